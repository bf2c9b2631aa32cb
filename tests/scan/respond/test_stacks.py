"""A rank that no longer gets on says where it stands; one that does says nothing."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.scan.respond.stacks import StallWatch, python_stacks

ROOT = Path(__file__).resolve().parents[3]


class Notes(list[Mapping[str, Any]]):
    """Notes, and waiting for them."""

    def until(self, count: int, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while len(self) < count:
            assert time.monotonic() < deadline, list(self)
            time.sleep(0.01)


@contextmanager
def looked_after(watched: StallWatch, period: float = 0.05) -> Iterator[None]:
    """What the recorder's background thread does."""
    stopped = threading.Event()

    def look() -> None:
        while not stopped.wait(period):
            watched.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def watch(progress: Callable[[], object], notes: Notes) -> StallWatch:
    return StallWatch(progress, notes.append, after=0.2, period=0.05)


def test_a_stall_leaves_the_stacks_and_is_told_seldom() -> None:
    notes, standing, released = Notes(), threading.Event(), threading.Event()

    def stands_here() -> None:
        standing.set()
        released.wait(60)

    thread = threading.Thread(target=stands_here, name="trainer")
    thread.start()
    standing.wait(10)
    with looked_after(watch(lambda: 7, notes)):
        notes.until(2)
    released.set()
    thread.join()
    first, second = notes[0], notes[1]
    assert first["what"] == "stack" and first["silent_seconds"] >= 0.2
    assert any("stands_here" in frame for frame in first["stacks"]["trainer"])
    assert second["silent_seconds"] >= 0.4, "the next one after twice the time"
    assert len(notes) <= 4


def test_a_rank_that_gets_on_says_nothing() -> None:
    notes, count = Notes(), iter(range(1_000_000))
    with looked_after(watch(lambda: next(count), notes)):
        time.sleep(0.6)
    assert not notes


def test_what_fails_in_it_is_said_once_and_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    def broken(note: Mapping[str, Any]) -> None:
        raise OSError("the disk is full")

    with caplog.at_level(logging.WARNING, logger="mt_megatron"):
        watched = StallWatch(lambda: 7, broken, after=0.0)
        for _ in range(3):
            time.sleep(0.001)
            watched.look()
    assert [record.getMessage() for record in caplog.records] == [
        "this rank no longer looks for stalls: OSError: the disk is full"
    ]


def test_a_process_that_was_stopped_as_a_whole_is_no_stall(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from mt_megatron.scan.respond.stacks import StallWatch\n"
        "watched = StallWatch(lambda: 7, lambda note: print('note', flush=True), after=3.0, period=0.05)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    time.sleep(0.05)\n"
        "    watched.look()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        process.send_signal(signal.SIGCONT)
        continued = time.monotonic()
        assert process.stdout.readline() == "note\n", "the stall that follows is one"
        assert time.monotonic() - continued >= 1.5, "the time in which it was stopped does not count"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_calling_thread_is_left_out() -> None:
    assert "MainThread" not in python_stacks()
