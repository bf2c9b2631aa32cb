"""``mt-megatron pipeline``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.cli.main import main
from mt_megatron.pipeline.csv_form import read_csv, to_csv
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.scan.analysis.pipeline_steps import MeasuredPipeline, slowest
from tools.scan_simulator import Job, parse_layout, simulate

Capture = pytest.CaptureFixture[str]


def pipeline(capsys: Capture, *words: str) -> str:
    assert main(["pipeline", *words]) == 0
    return capsys.readouterr().out


def data(capsys: Capture, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(pipeline(capsys, *words, "--json"))
    assert found["simulated"] is True
    return found


def test_one_schedule_by_sizes_and_times(capsys: Capture) -> None:
    found = data(capsys, "simulate", "zb_h1", "--ranks", "4", "--microbatches", "8", "--backward", "2")
    assert found["step_seconds"] == pytest.approx(8 * 3 + 3 * (1 + 2 - 2))
    assert [rank["peak_activations"] for rank in found["ranks"]] == [4, 4, 4, 4]
    words = ("simulate", "1f1b", "--ranks", "4", "--microbatches", "8")
    slow = data(capsys, *words, "--slow-link", "2-1:latency_ms=500,gbit=8", "--message-mb", "100")
    assert slow["step_seconds"] > data(capsys, *words)["step_seconds"] + 1.0
    costly = max(slow["links"], key=lambda link: link["costs_seconds"])
    assert {costly["from"], costly["to"]} == {1, 2} and costly["gbit"] == 8.0
    blocking = data(capsys, *words, "--latency-ms", "100", "--blocking")
    assert blocking["step_seconds"] > data(capsys, *words, "--latency-ms", "100")["step_seconds"]
    text = pipeline(capsys, *words, "--slow-link", "2-1:latency_ms=500")
    assert "1 -> 2: 500 ms, 8 messages" in text and "simulated" in text


def test_a_traced_run(capsys: Capture, tmp_path: Path) -> None:
    simulate(tmp_path, Job(layout=parse_layout("pp=4"), steps=8, microbatches=8), [], seed=2)
    own = data(capsys, "simulate", "--from", str(tmp_path))
    assert own["schedule"] == "1f1b" and own["microbatches"] == 8
    assert "ms measured" in own["about"][1] and "simulated trace" in own["about"][0]
    other = data(capsys, "simulate", "zb_h1", "--from", str(tmp_path))
    assert other["step_seconds"] < own["step_seconds"]
    assert data(capsys, "simulate", "--from", str(tmp_path), "--microbatches", "16")["microbatches"] == 16
    rows = data(capsys, "compare", "--from", str(tmp_path), "--replicas", "0")["rows"]
    assert rows[0]["name"] == "the run's own, blocking"
    assert rows[0]["seconds"] == pytest.approx(own["step_seconds"])
    assert rows[0]["against"] == pytest.approx(1.0)


def test_a_traced_schedule_with_other_sizes(capsys: Capture, tmp_path: Path) -> None:
    simulate(tmp_path, Job(layout=parse_layout("pp=4,vpp=2"), steps=8, microbatches=8), [], seed=2)
    run = ("simulate", "--from", str(tmp_path))
    own = data(capsys, *run)
    assert (own["schedule"], own["chunks"]) == ("interleaved", 2)
    longer = data(capsys, *run, "--microbatches", "16")
    assert (longer["schedule"], longer["chunks"], longer["microbatches"]) == ("interleaved", 2, 16)
    named = (*run, "--schedule", "interleaved")
    # As the run's, its calls wait for their exchanges.
    assert longer["step_seconds"] > data(capsys, *named, "--microbatches", "16")["step_seconds"]
    plain = data(capsys, *run, "--chunks", "1")
    assert (plain["schedule"], plain["chunks"]) == ("1f1b", 1)
    assert data(capsys, *run, "--blocking")["step_seconds"] == own["step_seconds"]


def test_links_of_a_traced_run(capsys: Capture, tmp_path: Path) -> None:
    simulate(tmp_path, Job(layout=parse_layout("pp=4"), steps=8, microbatches=8), [], seed=2)
    run = ("simulate", "--from", str(tmp_path))
    own = data(capsys, *run)
    gbit = [link["gbit"] for link in own["links"]]
    assert all(gbit)
    later = data(capsys, *run, "--latency-ms", "3")
    assert [link["latency_seconds"] for link in later["links"]] == [0.003] * len(own["links"])
    # Another one of the run's steps is the typical one then, which has links of its own.
    assert [link["gbit"] for link in later["links"]] == pytest.approx(gbit, rel=0.2)
    wider = data(capsys, *run, "--link-gbit", "7")
    assert {link["gbit"] for link in wider["links"]} == {7.0}
    assert 0 < max(link["latency_seconds"] for link in wider["links"]) < 1e-3
    # Two chunks send from the last rank to the first, which the run did not.
    other = data(capsys, *run, "--schedule", "interleaved", "--chunks", "2")
    around = [link for link in other["links"] if {link["from"], link["to"]} == {0, 3}]
    assert len(around) == 2 and all(0.8 * min(gbit) < link["gbit"] < 1.2 * max(gbit) for link in around)
    assert "links that the run did not use" in other["about"][-1] and "3 -> 0" in other["about"][-1]


def test_a_schedule_without_a_name_keeps_its_sizes(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(tmp_path, Job(layout=parse_layout("pp=4"), steps=8, microbatches=8), [], seed=2)
    monkeypatch.setattr("mt_megatron.scan.analysis.pipeline_steps.NAMES", ())
    words = ["pipeline", "simulate", "--from", str(tmp_path)]
    assert data(capsys, *words[1:])["schedule"] == "recorded"
    assert main([*words, "--microbatches", "16"]) == 2
    assert "the run's schedule is none of the generated ones" in capsys.readouterr().err


def test_other_chunks_of_a_traced_v_are_refused(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(tmp_path, Job(layout=parse_layout("pp=4,vpp=2"), steps=8, microbatches=8), [], seed=2)

    def as_v(found: Sequence[MeasuredPipeline]) -> MeasuredPipeline:
        schedule = generate("zbv", ranks=4, microbatches=8)
        return replace(slowest(found), schedule=schedule, calls="asynchronous")

    monkeypatch.setattr("mt_megatron.cli.pipeline.setting.slowest", as_v)
    run = ("simulate", "--from", str(tmp_path))
    same = data(capsys, *run, "--chunks", "2", "--microbatches", "16")
    assert (same["schedule"], same["chunks"], same["microbatches"]) == ("zbv", 2, 16)
    assert main(["pipeline", *run, "--chunks", "4"]) == 2
    assert "--chunks is 4 and the run's schedule is zbv, which has 2 on each rank" in capsys.readouterr().err
    assert data(capsys, *run, "--chunks", "4", "--schedule", "depth_first")["chunks"] == 4


def test_clusters_and_configurations(capsys: Capture) -> None:
    found = data(capsys, "compare", "--cluster", "64x200g")
    rows = {row["name"]: row for row in found["rows"]}
    assert "200 Gb/s" in found["about"][0] and "estimates, not measurements" in found["about"][1]
    assert rows["zbv"]["seconds"] < rows["1f1b"]["seconds"] < rows["1f1b, blocking"]["seconds"]
    assert rows["breadth_first"]["bytes"] > rows["depth_first"]["bytes"] > 2**30
    assert "a rank of 4 pipelines lost, re-routed" in rows
    text = pipeline(capsys, "compare", "--cluster", "8x200g", "--add", "hybrid:12")
    assert "every figure below is simulated" in text and "hybrid:16" in text and " GiB" in text
    own = ["--model", "llama3_8b", "--pipeline-model-parallel-size", "4", "--global-batch-size", "16"]
    step = data(capsys, "simulate", "1f1b", *own, "--world-size", "4")
    assert step["microbatches"] == 16 and step["ranks"][0]["peak_bytes"] > 2**30


def test_pictures_and_files(capsys: Capture, tmp_path: Path) -> None:
    text = pipeline(capsys, "draw", "dualpipev", "--ranks", "2", "--width", "100")
    assert text.startswith("rank 0 F0") and max(map(len, text.splitlines()[:2])) <= 100
    for suffix in ("svg", "txt"):
        file = tmp_path / f"step.{suffix}"
        assert f"{file}: interleaved, simulated" in pipeline(
            capsys, "draw", "interleaved", "--chunks", "2", "--output", str(file)
        )
        assert "interleaved" in file.read_text()
    file = tmp_path / "mine.csv"
    pipeline(capsys, "draw", "memory_capped:3", "--slow-link", "1-2:latency_ms=2000", "--output", str(file))
    assert read_csv(file).microbatches == 8
    found = data(capsys, "simulate", str(file), "--slow-link", "1-2:latency_ms=2000")
    assert max(rank["peak_activations"] for rank in found["ranks"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("simulate 2f2b", "expected one of 1f1b"),
        ("simulate zb-h", "Did you mean zb_h1"),
        ("simulate hybrid:x", "expected hybrid:NUMBER"),
        ("simulate interleaved --microbatches 6 --chunks 2", "expected a multiple of 4"),
        ("simulate --ranks 0", "--ranks is 0"),
        ("simulate --chunks 0", "--chunks is 0"),
        ("simulate --microbatches 0", "--microbatches is 0"),
        ("simulate --weight 5", "weight gradients as a part of the backward"),
        ("simulate --slow-link 1-9:latency_ms=1", "two of the ranks 0 to 3"),
        ("simulate --slow-link 0-2:latency_ms=1", "under schedule 1f1b: 0-1, 1-2, 2-3"),
        ("simulate --slow-link 0-3:latency_ms=1", "under schedule 1f1b: 0-1, 1-2, 2-3"),
        ("compare --slow-link 0-2:latency_ms=1", "any of the schedules: 0-1, 0-3, 1-2, 2-3"),
        ("simulate --slow-link 1-2", "expected A-B:latency_ms=X"),
        ("simulate --slow-link 1-2:gbit=fast", "expected numbers"),
        ("simulate --slow-link 1-2:gbit=0", "a bandwidth above 0"),
        ("simulate --cluster 8x200g --ranks 4", "expected one of them"),
        ("simulate --cluster 8x200g --model llama3_8b --world-size 8", "expected one of them"),
        ("simulate --model llama3_8b", "--world-size is not given"),
        ("simulate --cluster 8x200g --world-size 8", "found --world-size 8 without options of pretrain"),
        ("compare --ranks 4 --device A100", "found --device A100 without options of pretrain"),
        ("simulate --model llama3_8b --world-size 8", "--pipeline-model-parallel-size is 1"),
        (
            "simulate --model llama3_8b --world-size 8 --pipeline-model-parallel-size 3",
            "the layout is impossible",
        ),
        ("simulate depth_first --blocking", "as Megatron-Core runs them"),
        ("draw --output step.png", "ends with .svg, .csv or .txt"),
        ("draw --width 3", "at least 40"),
        ("draw --output none/step.svg", "expected a place to write"),
    ],
)
def test_what_is_wrong_is_said(
    words: str, message: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pipeline", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_a_trace_is_wrong_use(capsys: Capture, tmp_path: Path) -> None:
    assert main(["pipeline", "simulate", "--from", str(tmp_path)]) == 2
    assert "found no trace" in capsys.readouterr().err


def test_a_file_of_other_sizes_is_refused(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "two.csv"
    file.write_text(to_csv(generate("1f1b", ranks=2, microbatches=2)))
    assert main(["pipeline", "simulate", str(file)]) == 2
    assert "has 2 ranks; expected 4" in capsys.readouterr().err
    file.write_text("0F0,0B0\n1F0\n")
    assert main(["pipeline", "simulate", str(file), "--ranks", "2"]) == 2
    assert "B of stage 1 is missing for micro-batch 0" in capsys.readouterr().err
