"""A run in which nobody waits for another and nobody gets on is named; one that computes or rests is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.findings.text import headline, next_step
from mt_megatron.scan.format.recording_end import Ended
from mt_megatron.scan.format.run_files import run_files, write_run
from mt_megatron.scan.monitor.watch import Watch
from mt_megatron.scan.report.gather import write_report
from tests.launch import ROOT

from .test_hang_progress import NOW, SECOND, end, hang_of, operation

STACKS = {"MainThread": ["loader.py:7 in read"]}


def stands(rank: int, **changed: Any) -> Any:
    """A rank of a job with pauses of 0.5 s that has stood still in its data for 9 s."""
    usual = {"inside": "data", "in_step": True, "usual_gap": SECOND // 2, "processors": 0.01}
    return replace(end(rank, last_event=9), **{**usual, **changed})


def test_one_rank_alone_that_stands_still_hangs() -> None:
    found = hang_of(stands(0, note={"what": "stack", "stacks": STACKS}))
    assert found is not None and found.ranks == (0,) and found.details["inside"] == "data"
    assert found.details["stacks"] == {"0": STACKS} and "rank 0 is alive, in data" in found.evidence
    assert headline(found) == "Rank 0 stands still in data" and "stack" in next_step(found)


def test_all_before_the_same_file_system_are_named_together() -> None:
    found = hang_of(stands(0), stands(1), stands(2, last_seen=NOW - 9 * SECOND))
    assert found is not None and headline(found) == "Ranks 0-2 stand still in data"
    assert any("rank 2 has written nothing for 9.0 s" in each for each in found.evidence)
    mixed = hang_of(stands(0), stands(1, inside=None))
    assert mixed is not None and headline(mixed) == "Ranks 0, 1 stand still in a step"


@pytest.mark.parametrize(
    "changed",
    [
        {"last_event": NOW - 5 * SECOND},  # not for long
        {"usual_gap": 2 * SECOND},  # that is usual here
        {"usual_gap": 0},  # the first steps
        {"processors": 0.9},  # it compiles, perhaps
        {"processors": float("nan")},  # who knows
        {"inside": "checkpoint"},
        {"inside": "pause"},
        {"inside": "pause", "last_event": NOW - 3600 * SECOND},  # it was told to stand still
        {"recording_off": True},
        {"recording_off": True, "last_seen": NOW - 9 * SECOND},
        {"inside": None, "in_step": False},  # what is done between steps is not recorded
        {"waiting": operation(4.0), "last_event": NOW - 4 * SECOND},
        {"ended": Ended(how="closed", why="", iteration=3, time=NOW, time_unix=1.8e9, session=0)},
    ],
)
def test_who_may_yet_get_on_is_left_alone(changed: dict[str, Any]) -> None:
    assert hang_of(stands(0, **changed)) is None
    both = hang_of(stands(0), stands(1, **changed))
    assert both is None or both.ranks == (0,) and "ended" in changed, "one that gets on keeps the run going"


@pytest.mark.parametrize(
    ("name", "value"), [("processors", 1.0), ("usual_gap", 0), ("inside", "checkpoint"), ("inside", "data")]
)
def test_patience_ends(name: str, value: Any) -> None:
    most = 7 if value == "data" else 60
    for seconds, hangs in ((most - 1, False), (most + 1, True)):
        one = stands(0, **{name: value}, last_event=NOW - seconds * SECOND)
        assert (hang_of(one) is not None) == hangs


def test_who_writes_nothing_any_more_is_stopped() -> None:
    found = hang_of(stands(0, inside=None, in_step=False, last_seen=NOW - 9 * SECOND))
    assert (
        found is not None and "rank 0 has written nothing for 9.0 s: it is stopped or dead" in found.evidence
    )


RANK = """
import sys, time
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.seams import events

recorder = Recorder(sys.argv[1], rank=0)
recorder.start()
for iteration in range(1, 10**6 if sys.argv[2] == "goes on" else 21):
    with events.span("step", iteration=iteration):
        time.sleep(0.02)
        if iteration == 20 and sys.argv[2] == "stands":
            with events.span("data"):
                time.sleep(60)
if sys.argv[2] == "ends":
    recorder.close()
elif sys.argv[2] == "off":
    recorder.set_level("off")
    with events.span("step", iteration=21):
        pass
time.sleep(60)
"""


def started(run: Path, how: str) -> subprocess.Popen[bytes]:
    write_run(run_files(run), {"world_size": 1})
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", RANK, str(run), how], env=environment)


def looked_at(run: Path, how: str, seconds: float) -> list[Finding]:
    """What a watcher finds of a process that took 20 steps and then stands, rests between steps, records
    nothing, ends, or is stopped."""
    child = started(run, how)
    told: list[Finding] = []
    try:
        watch = Watch(run_files(run), hang_after_s=3.0)
        deadline = time.monotonic() + 60
        while not told and time.monotonic() < deadline:
            told += [each for each in watch.look() if each.cause == "hang"]
            if watch._done is not None and how == "stops" and deadline - time.monotonic() > seconds:
                child.send_signal(signal.SIGSTOP)
            if watch._done is not None:
                deadline = min(deadline, time.monotonic() + seconds)
            time.sleep(0.1)
    finally:
        child.kill()
        child.wait()
    return told


def test_a_process_that_stands_still_is_named_while_it_does(tmp_path: Path) -> None:
    (found,) = looked_at(tmp_path, "stands", 60)
    assert found.ranks == (0,) and found.details["inside"] == "data" and found.first_step == 20
    assert "1 rank " in write_report(tmp_path).markdown.read_text(), "of a trace without any communication"


def test_a_process_that_is_stopped_is_named(tmp_path: Path) -> None:
    (found,) = looked_at(tmp_path, "stops", 20)
    assert found.ranks == (0,) and "stopped or dead" in " ".join(found.evidence)


def test_a_process_that_is_done_with_its_steps_does_not_hang(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        found = {how: pool.submit(looked_at, tmp_path / how, how, 8) for how in ("rests", "off", "ends")}
    assert all(each.result() == [] for each in found.values()), found


def test_a_machine_that_stood_still_as_a_whole_is_no_hang(tmp_path: Path) -> None:
    findings = run_files(tmp_path).findings
    rank = started(tmp_path, "goes on")
    command = [
        sys.executable,
        "-m",
        "mt_megatron.scan.monitor.watch",
        str(tmp_path),
        "--parent-pid",
        str(rank.pid),
    ]
    watcher = subprocess.Popen([*command, "--hang-seconds", "3", "--period", "0.2"], cwd=ROOT)
    try:
        time.sleep(4)
        for child in (rank, watcher):
            child.send_signal(signal.SIGSTOP)
        time.sleep(6)
        watcher.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        rank.send_signal(signal.SIGCONT)
        time.sleep(3)
        hangs = findings.read_text().count('"hang"') if findings.exists() else 0
        rank.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while not (findings.exists() and '"hang"' in findings.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for child in (rank, watcher):
            child.kill()
            child.wait()
    assert hangs == 0
    assert '"hang"' in findings.read_text(), "the control: the rank alone, as long"
