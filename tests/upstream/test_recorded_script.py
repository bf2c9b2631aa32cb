"""Scripts of others under MegaScan and MegaScope: the same bits, true figures, commands, all ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.cli.main import main
from mt_megatron.errors import ConfigError, ScopeError
from mt_megatron.launching.scripts.choice import (
    MEGASCAN,
    MEGASCOPE,
    MEGASCOPE_INTERVAL,
    RUN_DIR,
    Choice,
    recorded_of,
)
from mt_megatron.launching.scripts.recording import loss_sums
from mt_megatron.parallel import rank_layout
from mt_megatron.scope.recording.reader import open_recording
from tests.launch import ROOT, run_command, run_ranks

SCRIPT = Path(__file__).parent / "scripts" / "recorded_script.py"
RANKS = "tests.upstream.recorded_ranks"


@pytest.mark.parametrize(
    ("tensor", "pipeline", "alone"),
    [
        (1, 2, False),
        pytest.param(2, 1, False, marks=pytest.mark.daily),
        pytest.param(1, 1, True, marks=pytest.mark.daily),
    ],
)
def test_a_recorded_script_computes_the_same(tmp_path: Path, tensor: int, pipeline: int, alone: bool) -> None:
    ranks = run_ranks(max(tensor * pipeline, 1), f"{RANKS}:compare", str(tmp_path), tensor, pipeline, alone)
    losses = None
    for found in ranks:
        (plain, recorded), (before, after) = found["losses"], found["weights"]
        assert plain == recorded and before == after, "to the bit"
        assert found["left"] == [False, False, 0] and found["threads"] == []
        losses = plain or losses
    assert losses is not None and len(losses) == 5
    with open_recording(tmp_path) as recording:
        steps = recording.steps()
        assert [int(step) for step in steps.step] == [1, 2, 3, 4, 5]
        assert steps.loss == pytest.approx(losses, rel=1e-6)
        oracle = {key: value for found in ranks for key, value in found["oracle"].items()}
        assert len(oracle) == 10
        for key, value in oracle.items():
            step, path = key.split()
            series = recording.series(path, "activation_rms")
            values = dict(zip([int(each) for each in series.step], series.value, strict=True))
            # Squares are summed up in float32, of 2 micro-batches of 2 x 16 x 32.
            assert values[int(step)] == pytest.approx(value, rel=2e-6), key
        norms = recording.series("", "gradient_norm")
        assert len(norms.step) == 5 and all(each > 0 for each in norms.value)
        if not alone:
            assert list(steps.grad_norm) == pytest.approx(list(norms.value), rel=1e-5)
        assert recording.series("", "update_ratio").value[0] > 0


def test_commands_that_a_script_cannot_follow_are_refused_by_name(tmp_path: Path) -> None:
    (found,) = run_ranks(1, f"{RANKS}:command", str(tmp_path))
    for name in ("undo", "step", "generate", "pair"):
        assert not found[name]["ok"] and f"the command {name}; a script" in found[name]["error"]
    assert found["pause"]["ok"] and found["paused"]["value"]["paused"]
    assert set(found["paused"]["value"]["refused"]) == {"undo", "step", "generate", "pair"}
    assert "undo_at" in found["undo_at"]["error"] and "cannot go back" in found["undo_at"]["error"]
    assert found["arm"]["ok"] and found["resume"]["ok"] and found["weights"]["ok"] and found["disarm"]["ok"]
    (noise,) = found["armed"]["value"]["armed"]
    assert noise["state"] == "acting" and not noise["can_undo"]
    with open_recording(tmp_path) as recording:
        texts = {text for _, text in recording.perturbed()}
        assert "noise" in texts and "noise; w" in texts


def test_steps_are_numbered_by_the_scheduler(tmp_path: Path) -> None:
    (found,) = run_ranks(1, f"{RANKS}:resumed", str(tmp_path))
    assert found == {"first": 12, "second": 2}, "40 samples, 4 a step, and 2 steps; then all anew"


@pytest.mark.parametrize(("tensor", "expected"), [(1, 6), (2, 3)])
def test_an_encoder_of_other_sizes_has_no_layout(
    monkeypatch: pytest.MonkeyPatch, tensor: int, expected: int
) -> None:
    # 12 ranks are 4 times an encoder of 1 and a decoder of 2, and can be divided by what either is told.
    sizes = {
        "tensor_model_parallel": tensor, "pipeline_model_parallel": 2, "data_parallel": 4,
        "virtual_pipeline_model_parallel": None, "context_parallel": 1, "expert_model_parallel": 1,
    }  # fmt: skip
    state = {f"get_{axis}_world_size": lambda size=size: size for axis, size in sizes.items()}
    monkeypatch.setattr(rank_layout, "_state", lambda: SimpleNamespace(**state))
    monkeypatch.setattr(rank_layout, "rank_of_world", lambda: (0, 12))
    with pytest.raises(ConfigError, match=f"found 4 data-parallel ranks, expected {expected}"):
        rank_layout.layout_of_groups()


def test_a_folder_that_another_script_records_into_is_left_alone(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".recorded.lock", create=True):
        (found,) = run_ranks(1, f"{RANKS}:short", str(tmp_path))
        assert found, "the script goes on"
    assert [path.name for path in tmp_path.iterdir()] == [".recorded.lock"]


@pytest.mark.daily
def test_a_slow_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, f"{RANKS}:slow", str(tmp_path))
    assert main(["scan", "report", str(tmp_path), "--json"]) == 1
    claimed = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["confidence"] > 0.5]
    assert claimed and {rank for each in claimed for rank in each["ranks"]} == {1}


@pytest.mark.parametrize(
    ("reports", "sums"),
    [
        ([], (0.0, 0.0)),
        (None, (0.0, 0.0)),
        ([{"lm loss": torch.tensor(2.0)}, {"lm loss": torch.tensor(4.0)}], (6.0, 2.0)),
        ([{"lm loss": (torch.tensor(6.0), torch.tensor(3))}], (6.0, 3.0)),
        ([{"acc": 1.0, "lm loss": torch.tensor([6.0, 3.0])}], (6.0, 3.0)),
        ([torch.tensor([2.0])], (2.0, 1.0)),
        ([{"lm loss": (torch.tensor(6.0), 3)}], (6.0, 3.0)),
        ([{"lm loss": (torch.tensor([6.0]), torch.tensor(3))}, 2.0], (8.0, 4.0)),
        ([{"lm loss": [torch.tensor([2.0])]}], (2.0, 1.0)),
        ([{"lm loss": (torch.ones(3), torch.ones(3))}], (0.0, 0.0)),
        ([2.5, 3.5], (6.0, 2.0)),
        ([{"accuracy": torch.tensor(1.0)}], (0.0, 0.0)),
        ([torch.ones(3, 3)], (0.0, 0.0)),
        (["done"], (0.0, 0.0)),
    ],
)
def test_losses_are_read_in_every_form(reports: Any, sums: tuple[float, float]) -> None:
    assert loss_sums(reports) == sums


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        ({MEGASCAN: "bas", RUN_DIR: "r"}, "--megascan bas; expected one of off, base, full, kernel.* base"),
        ({MEGASCOPE: "on", RUN_DIR: "r"}, "--megascope on; expected one of off, record, live"),
        ({MEGASCAN: "base"}, "--run-dir"),
        ({MEGASCAN: "base", RUN_DIR: __file__}, "no folder"),
        ({MEGASCOPE: "live", RUN_DIR: "r", MEGASCOPE_INTERVAL: "0"}, "--megascope-interval 0"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_script(wanted: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        recorded_of(wanted)


@pytest.mark.parametrize("recorded", [["--megascan", "base", "--run-dir", "r"], []])
def test_an_interval_without_megascope_is_refused(recorded: list[str], capsys: Any) -> None:
    assert main(["run", "--backend", "cpu", *recorded, "--megascope-interval", "5", "--", __file__]) == 2
    assert "--megascope-interval applies to MegaScope alone" in capsys.readouterr().err


def test_children_record_as_their_parent(tmp_path: Path) -> None:
    asked = recorded_of({MEGASCAN: "full", RUN_DIR: str(tmp_path)})
    assert asked is not None and (asked.scan, asked.scope, asked.interval) == ("full", "off", 20)
    for recorded in (asked, None):
        environment = Choice(backend="cpu", recorded=recorded).environment({MEGASCAN: "base", RUN_DIR: "x"})
        made = Choice.of_environment(environment)
        assert made is not None and made.recorded == recorded
    assert not {MEGASCAN, MEGASCOPE, RUN_DIR} & set(Choice(backend="cpu").environment({}))


def run_script(folder: Path, options: list[str], *script: str) -> Any:
    """The script by ``mt-megatron run`` in one process, as a user starts it."""
    environment: Mapping[str, str] = {
        **{name: value for name, value in os.environ.items() if not name.endswith(("RANK", "WORLD_SIZE"))},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "mt_megatron.cli", "run", "--backend", "cpu", *options, "--", *script]
    return run_command(command, env=environment, cwd=folder, timeout=240)


def allow_once_recorded(folder: Path) -> None:
    """What a process has recorded is written by others within a second or so; a killed one's no sooner."""
    while True:
        with suppress(ScopeError), open_recording(folder / "run") as recording:
            if recording.last_step() == 2:
                (folder / "now").touch()
                return
        time.sleep(0.2)


@pytest.mark.daily
@pytest.mark.parametrize(("ending", "code"), [("raise", 1), ("exit", 7), ("kill", -signal.SIGKILL), ("", 0)])
def test_however_a_script_ends_its_run_can_be_read(
    tmp_path: Path, ending: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--megascan", "base", "--megascope", "record", "--megascope-interval", "1"]
    if ending == "kill":
        threading.Thread(target=allow_once_recorded, args=(tmp_path,), daemon=True).start()
    done = run_script(
        tmp_path, [*options, "--run-dir", str(tmp_path / "run")], str(SCRIPT), str(tmp_path), "1", "1", "5",
        *([ending] if ending else []),
    )  # fmt: skip
    assert done.returncode == code, done.stderr[-3000:]
    assert "from step 1 on: no scheduler says" in done.stderr
    for words in (["scan", "status"], ["scan", "report"], ["scope", "status"], ["scope", "report"]):
        assert main([*words, str(tmp_path / "run")]) in (0, 1), capsys.readouterr()
    with open_recording(tmp_path / "run") as recording:
        # The third was made, but for its update; of a killed process nobody heard of its end.
        assert recording.last_step() == {"": 5, "kill": 2}.get(ending, 3)


@pytest.mark.daily
def test_a_script_that_makes_no_step_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import torch\nprint('done')\n")
    options = ["--megascan", "base", "--megascope", "live", "--run-dir", str(tmp_path / "run")]
    done = run_script(tmp_path, options, str(tmp_path / "idle.py"))
    assert done.returncode == 0 and "nothing was recorded: the script never called" in done.stderr
    assert not (tmp_path / "run").exists()
    done = run_script(tmp_path, [*options, "--megascan", "some"], str(tmp_path / "idle.py"))
    assert done.returncode == 2 and "expected one of off, base" in done.stderr and not done.stdout
