"""Sinks: what each package is given, by stand-ins that know its interface; TensorBoard's files are read."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.scope.sidecar.sinks import base
from mt_megatron.scope.sidecar.sinks.base import DEFAULTS, SinkError, make, parsed
from mt_megatron.scope.sidecar.sinks.queued import QueuedSink, queued
from mt_megatron.training.validate import scope_problems

NUMBERS = {"run/loss": 2.5, "gradient_norm/decoder.layers.0": 0.125}


class Run:
    """A run of wandb or trackio as its documentation has it."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.metrics: list[tuple[str, str]] = []
        self.logged: list[tuple[dict[str, float], int | None]] = []
        self.finished = False

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished = True


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """A package ``name`` whose ``init`` gives runs, which are listed."""
    runs: list[Run] = []
    module = types.ModuleType(name)

    def init(**given: Any) -> Run:
        runs.append(Run(**given))
        return runs[-1]

    module.init = init  # type: ignore[attr-defined]
    module.Settings = lambda **given: given  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    return runs


def absent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also its parts, which other tests may have imported."""
    for each in [name, *(each for each in sys.modules if each.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, each, None)
    monkeypatch.setattr(base, "find_spec", lambda asked: None if asked == name else object())


def test_wandb_gets_numbers_against_the_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    runs = stand_in("wandb", monkeypatch)
    sink = make("wandb:pretraining", tmp_path / "llama")
    (run,) = runs
    assert (run.given["project"], run.given["name"], run.given["group"]) == (
        "pretraining",
        "llama-scope",
        "llama",
    )
    assert run.given["mode"] == "offline" and run.given["dir"] == str(tmp_path / "llama")
    assert run.metrics == [("scope/*", "iteration")]
    sink.record(20, NUMBERS)
    sink.close()
    named = {f"scope/{name}": value for name, value in NUMBERS.items()}
    assert run.logged == [({"iteration": 20, **named}, None)] and run.finished


@pytest.mark.parametrize("name", ["WANDB_MODE", "WANDB_API_KEY"])
def test_wandb_is_online_where_the_environment_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "online")
    runs = stand_in("wandb", monkeypatch)
    make("wandb", tmp_path)
    assert runs[0].given["mode"] is None and runs[0].given["project"] == "mt_megatron"


def test_trackio_gets_numbers_at_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = stand_in("trackio", monkeypatch)
    sink = make("trackio:pretraining", tmp_path / "llama")
    sink.record(20, NUMBERS)
    sink.record(40, NUMBERS)
    sink.close()
    (run,) = runs
    assert (run.given["project"], run.given["name"]) == ("pretraining", "llama-scope")
    named = {f"scope/{name}": value for name, value in NUMBERS.items()}
    assert run.logged == [(named, 20), (named, 40)] and run.finished


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = make("tensorboard", tmp_path)
    for step in (20, 40):
        sink.record(step, {name: value * step for name, value in NUMBERS.items()})
    # Each step is there at once: a killed sidecar leaves what it had written.
    for closed in (False, True):
        found = accumulator.EventAccumulator(str(tmp_path / "scope" / "tensorboard")).Reload()
        assert set(found.Tags()["scalars"]) == {f"scope/{name}" for name in NUMBERS}
        for name, value in NUMBERS.items():
            scalars = [(each.step, each.value) for each in found.Scalars(f"scope/{name}")]
            assert scalars == [(20, value * 20), (40, value * 40)]
        if not closed:
            sink.close()
    make("tensorboard:elsewhere", tmp_path).close()
    assert any((tmp_path / "elsewhere").iterdir())


def test_tensorboard_shows_the_later_of_steps_that_were_trained_twice(tmp_path: Path) -> None:
    """The run resumes from step 5 and goes back to 7 later; samples come after their step's own numbers."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def trained(sink: base.Sink, first: int, last: int, value: float) -> None:
        for step in range(first, last + 1):
            sink.record(step, {"run/loss": value})
            if step % 2 == 0:
                sink.record(step, {"gradient_norm/model": value})

    sink = make("tensorboard", tmp_path)
    trained(sink, 1, 10, 1.0)
    sink.close()
    sink = make("tensorboard", tmp_path)
    trained(sink, 6, 9, 2.0)
    trained(sink, 7, 8, 3.0)
    sink.close()
    found = accumulator.EventAccumulator(str(tmp_path / "scope" / "tensorboard")).Reload()
    losses = [(each.step, each.value) for each in found.Scalars("scope/run/loss")]
    assert losses == [*((step, 1.0) for step in range(1, 6)), (6, 2.0), (7, 3.0), (8, 3.0)]
    norms = [(each.step, each.value) for each in found.Scalars("scope/gradient_norm/model")]
    assert norms == [(2, 1.0), (4, 1.0), (6, 2.0), (8, 3.0)]


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_missing_package_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(name, monkeypatch)
    said: list[str] = []
    (sink,) = queued([name], tmp_path, said.append)
    sink.record(1, NUMBERS)
    sink.close()
    (line,) = said
    assert f"nothing goes to {name}" in line and f"pip install 'mt_megatron[{name}]'" in line


def test_a_package_that_refuses_is_one_line_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = stand_in("trackio", monkeypatch)
    stand_in("wandb", monkeypatch)

    def refuses(**_: Any) -> None:
        raise PermissionError("api key not configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuses)
    said: list[str] = []
    sinks = queued(["wandb:p", "trackio:p"], tmp_path, said.append)
    for sink in sinks:
        sink.record(20, NUMBERS)
        sink.close()
    (run,) = runs
    assert len(run.logged) == 1 and run.finished
    assert said == ["scope: nothing goes to wandb:p: PermissionError: api key not configured"]


class Stubborn:
    """A sink whose server answers when it is told to."""

    title = "stubborn"

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.steps: list[int] = []

    def record(self, step: int, numbers: Any) -> None:
        self.answers.wait(30)
        self.steps.append(step)

    def close(self) -> None:
        self.steps.append(-1)


def test_nobody_waits_for_a_server_and_what_it_cannot_take_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_megatron.scope.sidecar.sinks.queued.MOST_NUMBERS", 4 * len(NUMBERS))
    monkeypatch.setattr("mt_megatron.scope.sidecar.sinks.queued.CLOSE_SECONDS", 0.2)
    said: list[str] = []
    inner, opens = Stubborn(), threading.Event()

    def open_sink() -> Stubborn:
        opens.wait(30)
        return inner

    sink = QueuedSink("stubborn", open_sink, said.append)
    for step in range(1, 8):
        sink.record(step, NUMBERS)
    assert sink.left_out == 3
    assert said == ["scope: stubborn does not keep up: numbers from step 5 on are left out of it"]
    sink.close()
    assert said[1:] == [
        "scope: stubborn lacks 3 records that it could not take in time",
        "scope: stubborn does not answer: it lacks the last 4 records",
    ]
    opens.set()
    inner.answers.set()
    sink._thread.join(30)
    assert inner.steps == [1, 2, 3, 4, -1]


@pytest.mark.parametrize("text", ["", "influx:x", "tensorboard:", ":x", "TensorBoard", "wandb:a\nb"])
def test_texts_that_are_no_sinks(text: str) -> None:
    with pytest.raises(SinkError, match="expected tensorboard\\[:FOLDER\\]"):
        parsed(text)


def problems(*sinks: str, scope: str = "record") -> list[str]:
    return scope_problems(load_config(["--scope", scope, "--scope-sink", *sinks]))


def test_the_option_is_checked_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda _: object())
    assert problems("tensorboard", "wandb:p", "trackio:a:b") == []
    assert load_config([]).scope.scope_sink == ()
    (line,) = problems("influx")
    assert "found the sink 'influx'" in line and "Change --scope-sink" in line
    (line,) = problems("wandb:a", "wandb:b")
    assert "wandb 2 times" in line
    (line,) = problems("tensorboard", scope="off")
    assert "scope_sink is given and scope is off" in line


def test_a_package_that_is_not_installed_ends_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    absent("trackio", monkeypatch)
    (line,) = problems("trackio:p", "tensorboard")
    assert "the package trackio is not installed" in line and 'pip install "mt_megatron[trackio]"' in line
