"""The trainer traces itself by default, leaves nothing behind when it shall not, and never fails for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.scan.clock.fit import fit_clocks
from mt_megatron.scan.format.records import KIND
from mt_megatron.training.run_folder import run_folder
from mt_megatron.training.scan_session import tracing_of
from tests.launch import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traced")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(2, "tests.training.scan_cases:runs", str(folder), timeout=300)


def test_a_run_that_keeps_something_keeps_a_trace(found: list[dict[str, Any]], folder: Path) -> None:
    facts = json.loads((folder / "default" / "scan" / "run.json").read_text())
    assert facts["world_size"] == 2 and facts["layout"]["dp"] == 2 and not facts["simulated"]
    assert [each["dp"] for each in facts["ranks"]] == [0, 1]
    assert facts["model"]["num_layers"] == 4 and facts["num_microbatches"] == 2
    for rank, each in enumerate(found):
        assert "scan-writer" in each["default"]["during"]
        assert each["default_trace"]["meta"]["dp"] == rank
        assert each["default_trace"]["meta"]["device_type"] == "cpu"
    assert (folder / "default" / "scan" / "rank-00001").stat().st_mode & 0o777 == 0o700


def test_all_events_of_a_step_are_there(found: list[dict[str, Any]]) -> None:
    wanted = {
        KIND[name] for name in ("step", "forward", "backward", "optimizer", "collective", "data", "layer")
    }
    for each in found:
        assert wanted <= set(each["default_trace"]["kinds"])


def test_what_goes_on_is_a_session_of_its_own(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["default_trace"]["session"] == 1
        assert {5, 6} <= set(each["default_trace"]["iterations"])
        assert not {1, 2, 3} & set(each["default_trace"]["iterations"])


def test_ranks_of_one_machine_share_a_clock(found: list[dict[str, Any]], folder: Path) -> None:
    clocks = fit_clocks(folder / "default")
    assert [clocks.residuals[rank].source for rank in (0, 1)] == ["reference", "same clock"]
    asked = [{*each["default_trace"]["peers"], *each["elsewhere_trace"]["peers"]} for each in found]
    assert asked == [set(), {0}]


def test_nothing_is_left_when_a_run_ends(found: list[dict[str, Any]]) -> None:
    for each in found:
        for name in ("default", "again", "off", "nowhere", "elsewhere", "blocked", "straggler"):
            assert each[name]["after"] == [] and not each[name]["listening"], name


def test_off_is_off(found: list[dict[str, Any]], folder: Path) -> None:
    for each in found:
        assert each["off"]["during"] == []
    assert not (folder / "off" / "scan").exists()


def test_without_a_place_it_says_so(found: list[dict[str, Any]]) -> None:
    assert found[0]["nowhere"]["during"] == []
    (line,) = [line for line in found[0]["nowhere"]["lines"] if "no trace" in line]
    assert line == "no trace is kept: give --save or --scan-dir (or --scan off)"
    assert not [line for line in found[0]["off"]["lines"] if "no trace" in line]


def test_a_place_of_its_own_and_a_window(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["elsewhere_trace"]["iterations"][-1] == 2
        assert KIND["layer"] in each["elsewhere_trace"]["kinds"]


def test_a_folder_that_cannot_be_made_ends_the_tracing_and_not_the_run(found: list[dict[str, Any]]) -> None:
    assert all(each["blocked"]["finished"] for each in found)
    (line,) = [line for line in found[0]["blocked"]["lines"] if line.startswith("scan: ")]
    assert "nothing is traced, training goes on: rank 0" in line


def test_a_confirmed_straggler_ends_the_run_with_a_checkpoint(found: list[dict[str, Any]]) -> None:
    for each in found:
        left = each["straggler"]
        assert left["straggler"] and not left["finished"]
        assert (left["iteration"], left["checkpoint"]) == (4, "iter_0000004")
        assert left["measured"] == ["after step 2"]
        assert not each["default"]["straggler"]


@pytest.mark.parametrize(
    ("flags", "metrics", "expected"),
    [
        ("", None, None),
        ("", "/dev/null", None),
        ("", "runs/a/metrics.jsonl", "runs/a"),
        ("--scan-dir elsewhere", "runs/a/metrics.jsonl", "elsewhere"),
        ("--scan-dir elsewhere", None, "elsewhere"),
    ],
)
def test_the_trace_lies_beside_the_metrics(flags: str, metrics: str | None, expected: str | None) -> None:
    config = load_config(flags.split())
    folder = run_folder(config.scan.scan_dir, None if metrics is None else Path(metrics))
    assert folder == (None if expected is None else Path(expected))


def test_rank_0_says_for_all_whether_there_is_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(said: list[Any], src: int) -> None:
        assert (said, src) == ([tmp_path], 0)
        said[0] = None

    monkeypatch.setattr("torch.distributed.broadcast_object_list", nowhere)
    job: Any = SimpleNamespace(layout=SimpleNamespace(world_size=2))
    config, lines = load_config(["--scan-dir", str(tmp_path)]), []
    tracing = tracing_of(config, job, metrics=None, modules=(), num_microbatches=1, say=lines.append)
    assert tracing.folder is None and [line for line in lines if "no trace is kept" in line]


def test_yaml_takes_a_bare_off(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("scan:\n  scan: off\n")
    assert load_config([], file).scan.scan == "off"
    assert load_config([]).scan.scan == "base"
