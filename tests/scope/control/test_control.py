"""Pause, step, resume and their ends, on one rank with a trainer that only counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.scope.control.commands import leave
from mt_megatron.scope.control.control import Control
from mt_megatron.scope.lab.lab import Lab, _Armed
from mt_megatron.scope.lab.specification import perturbation_from
from mt_megatron.scope.recording.checks import checked
from mt_megatron.scope.session import Session
from mt_megatron.seams import events
from tests.scope.recording.audit_lines import read_audit


class Counting:
    """A trainer without a model."""

    rank = 0
    refused: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.iteration = 0
        self.rested: list[str] = []
        self.heeded: list[Sequence[int]] = []
        self.aside_seconds = self.aside_began = 0.0
        self.on_aside: list[Callable[[], None]] = []
        self.stop = False
        self.layout = SimpleNamespace(world_size=1)
        self.backend = SimpleNamespace(current_device=lambda: 0, device=lambda index: "cpu")

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return values

    def rest(self, where: str) -> None:
        self.rested.append(where)

    def wishes(self) -> tuple[bool, ...]:
        return (self.stop,)

    def heed(self, counts: Sequence[int]) -> bool:
        self.heeded.append(counts)
        return bool(counts[0])

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.aside_began = time.monotonic()
        if self.on_aside:
            self.on_aside.pop(0)()
        yield
        self.aside_seconds += time.monotonic() - self.aside_began


class Run:
    """A training loop, and what it said."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        trainer: Counting | None = None,
        pause_minutes: float = 30.0,
        **handlers: Any,
    ) -> None:
        self.trainer = trainer or Counting()
        self.said: list[str] = []
        self.answers: list[Mapping[str, Any]] = []
        given: Any = self.trainer
        self.control = Control(
            given,
            lab=Lab(given, say=self.said.append),
            folder=folder,
            say=self.said.append,
            answer=self.answers.append,
            handlers=handlers,
            pause_minutes=pause_minutes,
            period=0.02,
        )
        self._numbers = iter(range(1000))

    def put(self, do: str, **arguments: Any) -> str:
        identity = f"c{next(self._numbers)}"
        self.control.put({"id": identity, "do": do, "arguments": arguments})
        return identity

    def in_pause(self, action: Callable[[], Any], *seconds: float) -> None:
        """Call ``action`` so long after the next pause (after those that are asked for already) has begun,
        however late this thread is."""

        def begun() -> None:
            for each in seconds:
                timer = threading.Timer(each, action)
                timer.daemon = True
                timer.start()

        self.trainer.on_aside.append(begun)

    def step(self) -> bool:
        """One step; whether it was attended to afterwards."""
        self.control.begin_step(self.trainer.iteration + 1)
        wants = self.control.wants_attention
        self.control.end_step(self.trainer.iteration + 1)
        self.trainer.iteration += 1
        if wants:
            self.control.attend()
        return wants

    def answer(self, identity: str) -> Mapping[str, Any]:
        (found,) = [each for each in self.answers if each["id"] == identity]
        return found


def test_a_pause_is_heard_in_the_step_and_ends_at_once_by_command() -> None:
    run = Run()
    assert not run.step()
    pause = run.put("pause")
    assert run.control.wants_attention
    resumed: list[float] = []
    run.in_pause(lambda: (resumed.append(time.monotonic()), run.put("resume")), 0.5)
    assert run.step() and not run.step()
    assert run.answer(pause)["value"] == {"paused": True, "steps_left": None, "step": 2}
    assert len(run.trainer.heeded) >= 2 and set(run.trainer.rested) == {"paused by command"}
    assert run.trainer.aside_seconds >= resumed[0] - run.trainer.aside_began >= 0.5, "a pause is no training"
    assert [line.split(";")[0] for line in run.said][:1] == ["scope: paused after step 2"]
    states = [each["value"]["paused"] for each in run.answers if each["id"] == "state"]
    assert states[0] and not states[-1]


def test_steps_are_counted() -> None:
    run = Run()
    run.put("pause")
    run.in_pause(lambda: run.put("step", n=3), 0.05)
    assert run.step()
    attended = []
    for _ in range(3):
        if len(attended) == 2:
            run.in_pause(lambda: run.put("resume"), 0.05)
        attended.append(run.step())
    assert attended == [False, False, True] and not run.step()
    assert sum("paused after step" in line for line in run.said) == 2
    assert any("paused after step 4" in line for line in run.said)


def test_a_pause_that_nobody_holds_ends_by_itself() -> None:
    run = Run(pause_minutes=1.5 / 60)
    run.put("pause")
    held: list[float] = []

    def hold() -> None:
        # Noted first: a thread that is late in between holds it for longer, not for less.
        held.append(time.monotonic())
        run.put("hold")

    run.in_pause(hold, 0.1, 0.2, 0.3)
    assert run.step()
    assert time.monotonic() - max(held) >= 1.5
    assert any("nobody has held the pause" in line for line in run.said)
    assert not run.control.paused and not run.step()


def test_a_run_that_ends_leaves_its_pause() -> None:
    run = Run()
    run.put("pause")

    def stop() -> None:
        run.trainer.stop = True

    run.in_pause(stop, 0.1)
    assert run.step() and not run.control.paused


def test_what_fails_is_answered_and_training_goes_on() -> None:
    def breaks(arguments: Mapping[str, Any]) -> None:
        raise ZeroDivisionError("of a handler")

    def refuses(arguments: Mapping[str, Any]) -> None:
        raise ConfigError("found nothing; expected something")

    def tells(arguments: Mapping[str, Any]) -> None:
        raise ConfigError("word" * 2000)

    run = Run(request=breaks, pair=refuses, arm=tells)
    long = run.put("arm")
    first, second = run.put("request", texts=[]), run.put("pair")
    unknown, wrong = run.put("stop"), run.put("step", n=0)
    undo = run.put("undo")
    status = run.put("status")
    assert run.answer(status)["value"]["waiting"], "answered at once"
    assert run.step() and not run.step()
    assert run.answer(first)["error"] == "ZeroDivisionError: of a handler"
    assert run.answer(second)["error"] == "found nothing; expected something"
    assert (
        "expected one of pause" in run.answer(unknown)["error"] and "found n: 0" in run.answer(wrong)["error"]
    )
    assert "nothing that can be undone" in run.answer(undo)["error"]
    assert checked(dict(run.answer(long)))["error"].endswith("word ..."), "the sidecar takes it"


def test_commands_and_answers_are_audited(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.control.start()
    try:
        run.put("pause")
        run.put("resume")
        assert run.step()
        whats = [
            (each["what"], each.get("do"), each["step"]) for each in read_audit(tmp_path / "audit.jsonl")
        ]
        assert whats == [("command", "pause", 1), ("command", "resume", 1)]
        assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600
        assert any(thread.name == "scope-commands" for thread in threading.enumerate())
    finally:
        run.control.close()
    assert not any(thread.name == "scope-commands" for thread in threading.enumerate())


def test_answers_go_where_the_command_came_from(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.control.start()
    try:
        left = leave(tmp_path, "pause", {})
        eventually = time.monotonic() + 20
        while not run.control.wants_attention:
            assert time.monotonic() < eventually
            time.sleep(0.01)
        by_the_page = run.put("resume")
        assert run.step()
        assert run.answer(left)["ok"] and run.answer(by_the_page)["ok"]
        assert [path.stem for path in (tmp_path / "results").iterdir()] == [left]
    finally:
        run.control.close()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "scope").write_text("in the way")
    run = Run(tmp_path / "scope")
    run.control.start()
    assert len(run.said) == 1 and "no commands are heard from" in run.said[0]
    run.put("pause")
    run.put("resume")
    assert run.step()
    run.control.close()


def test_a_pause_is_an_event_of_its_own() -> None:
    run, heard = Run(), []
    stop = events.subscribe(lambda phase, name, attrs: heard.append((phase, name, dict(attrs))), {"pause"})
    run.put("pause")
    run.in_pause(lambda: run.put("resume"), 0.05)
    run.step()
    stop()
    assert heard == [("begin", "pause", {"op": "commanded"}), ("end", "pause", {})]


def test_a_monitor_that_asks_for_the_status_keeps_no_pause() -> None:
    run = Run()
    last = run.control._heard
    run.put("status")
    assert run.control._heard == last and len(run.answers) == 1
    run.put("hold")
    assert run.control._heard > last


@pytest.mark.parametrize("identity", ["", "a" * 81, "../x", "a\0"])
def test_ids_that_are_none_are_answered(identity: str) -> None:
    run = Run()
    run.control.put({"id": identity, "do": "pause"})
    assert len(run.answers) == 1 and "found id" in run.answers[0]["error"]
    # A sidecar that refuses a frame records nothing more of its rank.
    assert checked(dict(run.answers[0]))["id"] == ""
    assert not run.step()


def _acted(name: str, began: int, snapshot: Any = None, **more: Any) -> _Armed:
    given = {"kind": "scale", "factor": 2, "on": "activation", "module": "*", "snapshot": False}
    one = perturbation_from({"name": name, **given})
    return _Armed(one=one, targets=[], began=began, snapshot=snapshot, judged=True, acted=1, **more)


def test_an_undo_tells_the_recording_where_the_run_is() -> None:
    gone: list[int] = []
    lab = Lab(Counting(), went_back=gone.append)  # type: ignore[arg-type]
    lab._armed.append(_acted("a", 3, SimpleNamespace(step=3, bytes=0, restore=lambda: gone.append(-1))))
    lab.undo()
    assert gone == [-1, 3], "once the state is back"


def test_a_rollback_leaves_the_marks_of_the_checkpoint() -> None:
    """Of step 4: what had acted before is in it, what has since is not and may act again."""
    lab = Lab(Counting(), began_perturbed="begun")  # type: ignore[arg-type]
    lab._armed += [_acted("before", 2), _acted("gone", 4, over=True), _acted("acts", 5)]
    lab._disarmed += [("early", 3), ("late", 6)]
    assert lab.perturbed == "begun; early; late; before; gone; acts"
    lab.rolled_back(4, "early; before")
    assert lab.perturbed == "early; before"
    states = {each["id"]: each["state"] for each in lab.status()["armed"]}
    assert states == {"before": "acting", "acts": "waiting"}
    lab.begin_step(9)
    assert lab.perturbed == "early; before; acts" and lab.status()["armed"][1]["since_step"] == 8
    lab.rolled_back(0, None)
    assert lab.perturbed is None


@pytest.mark.parametrize("raises", [False, True])
def test_a_step_beside_the_run_is_sent_unless_it_raised_an_error(raises: bool) -> None:
    sent: list[int] = []
    session: Any = SimpleNamespace(_mark=None, _outbox=SimpleNamespace(beside=lambda *_: None), _on=True)
    session._open = lambda step: setattr(session, "_step", step)
    session._close_taps = lambda: None
    session._send = lambda outbox, step, figures: sent.append(step)
    with suppress(MemoryError), Session.around_step(session, 5, "pair a: baseline"):
        assert session._mark == "pair a: baseline"
        if raises:
            raise MemoryError
    assert sent == ([] if raises else [5]) and session._mark is None
