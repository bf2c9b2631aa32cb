"""Watching in the training loop: on where there is a place, off without a trace, never in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.checkpoint.progress import Progress
from mt_megatron.config.parse import load_config
from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.recording.sql import query
from mt_megatron.scope.report.compare import compare
from mt_megatron.scope.report.gather import gathered
from mt_megatron.scope.report.html import page
from mt_megatron.scope.report.status import status_of
from mt_megatron.training import loop
from mt_megatron.training.run_folder import run_folder
from mt_megatron.training.scope_session import Scope
from tests.launch import run_ranks
from tests.training.scope_cases import ENDS_IN, STEPS

DAILY = os.environ.get("MT_MEGATRON_DAILY") == "1"
ENDS = {"whole": STEPS, "error": ENDS_IN - 1, **({"nan": ENDS_IN, "signal": ENDS_IN} if DAILY else {})}
"""Last step that is recorded, by how a run ends; of one that raised an error within it nothing is."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = run_ranks(
        2, "tests.training.scope_cases:watched_runs", str(folder), timeout=240
    )
    return ranks


def test_every_run_finishes_and_leaves_no_thread(found: list[dict[str, Any]]) -> None:
    for each in found:
        for name, run in each.items():
            assert run["finished"] == (name != "undone") and run["after"] == [], name


def test_off_is_off(found: list[dict[str, Any]], folder: Path) -> None:
    for each in found:
        assert each["off"]["during"] == [] and each["off"]["loaded"] == [] and each["off"]["lines"] == []
    assert not (folder / "off" / "scope").exists()


def test_losses_are_those_without(found: list[dict[str, Any]]) -> None:
    for each in found:
        losses = {name: run["loss"] for name, run in each.items() if run["iteration"] == STEPS}
        assert len(set(losses.values())) == 1, losses


def test_what_was_recorded_is_read_back(found: list[dict[str, Any]], folder: Path) -> None:
    assert found[0]["record"]["during"]
    recording = open_recording(folder / "record")
    series = recording.series("decoder.layers.1", "gradient_norm")
    # The first steps, and every second one.
    assert series.step.tolist() == [1, 2, 4, 5, 6]
    assert not series.partial.any() and (series.value > 0).all()
    assert sorted(set(recording.steps().step.tolist())) == list(range(1, STEPS + 3))
    assert [key.what for key in recording.tensors() if key.step == 2] == ["mlp", "mlp_hidden"]
    assert len(recording.sessions()) == 2
    recording.close()


def test_a_real_recording_is_read_by_everything(found: list[dict[str, Any]], folder: Path) -> None:
    """Its module lists are those of ranks: with the model itself, whose path is empty."""
    assert found[0]["record"]["finished"]
    with open_recording(folder / "record") as recording:
        paths = [each.path for each in recording.modules()]
        assert paths[-1] == "" and "decoder.layers.1.mlp" in paths and len(set(paths)) == len(paths)
        assert compare(recording, recording).equal
        assert "decoder.layers.1" in page(gathered(recording))
        rows = query(recording, "select count(*) from modules").rows
        assert rows == [(len(paths),)]
        assert status_of(recording).step == STEPS + 2


def test_a_run_that_ends_perturbed_ends_with_the_figures_of_what_it_keeps(
    found: list[dict[str, Any]], folder: Path
) -> None:
    records = [json.loads(line) for line in (folder / "undone" / "metrics.jsonl").read_text().splitlines()]
    losses = {each["iteration"]: each["loss"] for each in records if each["event"] == "train"}
    (end,) = [each for each in records if each["event"] == "end"]
    assert sorted(losses) == [1, 2, 3, 4] and end["iteration"] == 2
    assert end["train_loss"] == losses[2] != losses[4] and "perturbed" not in end
    for each in found:
        run = each["undone"]
        assert (run["finished"], run["iteration"], run["loss"]) == (False, 2, losses[2].hex())
    with open_recording(folder / "undone") as recording:
        status = status_of(recording)
        assert (status.step, status.last_sample, status.ended, status.perturbed) == (2, 2, 2, 0)
        assert recording.steps(session=0).step.tolist() == [1, 2, 3, 4]


def test_a_rollback_tells_the_lab_what_the_checkpoint_was_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    run: Any = object.__new__(loop._Run)
    run.store = SimpleNamespace(rollback=lambda: Progress(iteration=4), newest=tmp_path)
    run.scope = Scope()
    run.scope.control = SimpleNamespace(lab=SimpleNamespace(rolled_back=lambda *given: told.append(given)))
    monkeypatch.setattr(loop, "read_manifest", lambda _: {"perturbed": "noise"})
    assert run._roll_back() == Progress(iteration=4) and told == [(4, "noise")]


def test_a_sink_gets_the_steps_of_both_starts_once(found: list[dict[str, Any]], folder: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "record" / "scope" / "tensorboard")).Reload()
    assert found[0]["record"]["finished"] and found[0]["again"]["finished"]
    losses = events.Scalars("scope/run/loss")
    assert [each.step for each in losses] == list(range(1, STEPS + 3))
    norms = events.Scalars("scope/gradient_norm/decoder.layers.1")
    assert [each.step for each in norms] == [1, 2, 4, 5, 6]
    with open_recording(folder / "record") as recording:
        series = recording.series("decoder.layers.1", "gradient_norm")
        assert [each.value for each in norms] == pytest.approx(series.value)


def test_an_unknown_module_is_one_line(found: list[dict[str, Any]]) -> None:
    lines = [line for line in found[0]["record"]["lines"] if "nowhere" in line]
    assert len(lines) == 1 and "decoder.layers.*" in lines[0]
    assert not [line for line in found[1]["record"]["lines"] if "nowhere" in line]


def test_without_a_place_it_says_so(found: list[dict[str, Any]]) -> None:
    assert found[0]["nowhere"]["during"] == []
    lines = found[0]["nowhere"]["lines"]
    assert len(lines) == 1 and "nothing is recorded" in lines[0] and "--scope-dir" in lines[0]


def test_a_package_that_one_node_lacks_is_one_line(found: list[dict[str, Any]], folder: Path) -> None:
    for each in found:
        lines = each["no_package"]["lines"]
        assert len(lines) == 1 and "rank 1: " in lines[0] and "training goes on" in lines[0]
        assert each["no_package"]["during"] == []
    assert not (folder / "no_package" / "scope").exists()


def test_a_folder_that_cannot_be_made_ends_the_recording_and_not_the_run(found: list[dict[str, Any]]) -> None:
    lines = found[0]["blocked"]["lines"]
    assert len(lines) == 1 and "cannot be written" in lines[0], lines
    assert found[1]["blocked"]["lines"] == []


def test_a_sidecar_that_raises_an_error_leaves_the_folder_free(found: list[dict[str, Any]]) -> None:
    assert found[0]["not_made"]["free"] and found[0]["not_ended"]["free"]
    (line,) = found[0]["not_made"]["lines"]
    assert "rank 0: OSError: [Errno 28] No space left on device" in line and "training goes on" in line


def test_ranks_with_folders_of_their_own_have_sidecars_of_their_own(
    found: list[dict[str, Any]], folder: Path
) -> None:
    """Two containers of one machine: one host name, each its own /tmp."""
    with open_recording(folder / "containers") as recording:
        assert [node.node for node in recording.nodes()] == [0, 1]
        # On a busy machine a node may write its steps after the other one's follower has stopped waiting.
        assert {each.kind for each in recording.alerts()} <= {"missing ranks"}
        assert [[each.rank for each in recording.rank_steps(step)] for step in (1, 2)] == [[0, 1], [0, 1]]
    assert all(not each["containers"]["lines"] for each in found)


def test_a_rank_that_does_not_reach_its_sidecar_is_said_and_an_alert(
    found: list[dict[str, Any]], folder: Path
) -> None:
    assert all(each["unreached"]["finished"] for each in found)
    (line,) = (line for line in found[1]["unreached"]["warnings"] if "scope:" in line)
    assert "nothing is recorded of rank 1" in line and "does not see its socket" in line
    with open_recording(folder / "unreached") as recording:
        (alert,) = recording.alerts()
    assert (
        (alert.kind, alert.value) == ("missing ranks", 1.0) and alert.step in (1, 2) and ": 1." in alert.text
    )
    assert len(scope_files(folder / "unreached").alerts.read_text().splitlines()) == 1


def test_missing_packages_are_one_line(found: list[dict[str, Any]], folder: Path) -> None:
    lines = [line for line in found[0]["no_page"]["lines"] if "uvicorn" in line]
    assert len(lines) == 1 and "mt_megatron[scope]" in lines[0]
    recording = open_recording(folder / "no_page")
    assert recording.series("decoder.layers.0", "weight_norm").step.tolist() == [1, 2, 4]
    recording.close()


def test_a_statistic_that_fails_ends_itself_and_not_the_run(found: list[dict[str, Any]]) -> None:
    lines = found[0]["broken"]["lines"]
    assert any("no more memory" in line and "training goes on" in line for line in lines)
    assert len(lines) == len(set(lines)) <= 6, lines


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ended")
    target = "tests.training.scope_cases:ended_runs"
    return folder, run_ranks(2, target, str(folder), list(ENDS), timeout=240)


@pytest.mark.parametrize("how", ENDS)
def test_every_node_keeps_everything_however_the_run_ends(
    ended: tuple[Path, list[dict[str, Any]]], how: str
) -> None:
    folder, ranks = ended
    expected = {"error": "RuntimeError: an error within", "nan": "DivergenceError: iteration"}.get(how)
    for each in ranks:
        assert each[how] is None if expected is None else each[how].startswith(expected), each[how]
    steps = list(range(1, ENDS[how] + 1))
    recording = open_recording(folder / how)
    nodes = recording.nodes()
    assert len(nodes) == 2, "each rank is a node of its own"
    for node in nodes:
        assert [step for (step,) in node.rows("SELECT DISTINCT step FROM step ORDER BY step")] == steps
    series = recording.series("decoder.layers.3", "gradient_norm")
    assert series.step.tolist() == steps
    assert series.of.tolist() == series.parts.tolist() and not series.partial.any()
    # Sequence 0 is of the first node, 7 of the second.
    for sample in (0, 7):
        taken = {key.step for key in recording.tensors() if key.index["sample"] == sample}
        assert sorted(taken) == steps, f"tensors of sample {sample}"
    recording.close()


def test_no_node_touches_the_folder_that_another_run_holds(
    ended: tuple[Path, list[dict[str, Any]]],
) -> None:
    refused = [each["refused"] for each in ended[1]]
    for each in refused:
        assert each["finished"] and each["during"] == [] and each["files"] == ["run.lock"]
    (line,) = refused[0]["lines"]
    assert "another run records to" in line and "training goes on" in line
    assert refused[1]["lines"] == []


@pytest.mark.parametrize(
    ("flags", "metrics", "expected"),
    [
        ("", None, None),
        ("", "/dev/null", None),
        ("", "runs/a/metrics.jsonl", "runs/a"),
        ("--scope-dir elsewhere", "runs/a/metrics.jsonl", "elsewhere"),
        ("--scope-dir elsewhere", None, "elsewhere"),
    ],
)
def test_the_recording_lies_beside_the_metrics(flags: str, metrics: str | None, expected: str | None) -> None:
    scope = load_config(flags.split()).scope
    folder = run_folder(scope.scope_dir, None if metrics is None else Path(metrics))
    assert folder == (None if expected is None else Path(expected))


def test_yaml_takes_a_bare_off(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("scope:\n  scope: off\n")
    assert load_config([], file).scope.scope == "off"
    assert load_config([]).scope.scope == "live"
