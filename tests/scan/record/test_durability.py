"""A killed process leaves readable files and loses a second at most; a full disk stops the tracing alone."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mt_megatron.scan.format.recording_end import read_ended
from mt_megatron.scan.format.records import KIND, OPEN
from mt_megatron.scan.format.segments import read_rank, segment_paths
from tests.launch import ROOT

# What is lost at most is a second; the rest is for a machine that has other things to do.
LOST_SECONDS = 1.0
BUSY_SECONDS = 4.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.scan.record.durability_cases", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def killed_after(folder: Path, seconds: float, ranks: int = 2) -> list[float]:
    """Start ``ranks`` processes and kill them ``seconds`` later; seconds that each lost."""
    children = [
        subprocess.Popen(
            command("until_killed", str(folder), str(rank)),
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    began = time.perf_counter_ns()
    time.sleep(seconds)
    lost = []
    for rank, child in enumerate(children):
        child.kill()
        killed = time.perf_counter_ns()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
        trace = read_rank(folder / "scan" / f"rank-{rank:05d}")
        assert trace.damaged == () or "no whole block" in trace.damaged[0]
        assert read_ended(folder / "scan" / f"rank-{rank:05d}", 0) is None, "it could say nothing"
        ended = trace.spans[trace.spans["end"] != OPEN]
        check_whole(ended[ended["kind"] == KIND["collective"]])
        last = int(ended["end"].max()) if len(ended) else began
        lost.append((killed - last) / 1e9)
    return lost


def check_whole(collectives: np.ndarray) -> None:
    """Ten per step in order, none missing in between: only the end may be lost."""
    numbers = collectives["iteration"].astype(np.int64) * 10 + collectives["seq"]
    assert (np.diff(numbers) == 1).all()
    assert (collectives["end"] >= collectives["begin"]).all()


@pytest.mark.parametrize("seconds", [0.0, 0.45, 1.1])
def test_a_killed_rank_leaves_what_it_wrote(tmp_path: Path, seconds: float) -> None:
    assert max(killed_after(tmp_path, seconds)) < LOST_SECONDS + BUSY_SECONDS


@pytest.mark.soak
def test_a_rank_killed_at_any_time_loses_a_second_at_most(
    tmp_path: Path, record_property: pytest.FixtureRequest
) -> None:
    rng = random.Random(0)
    lost: list[float] = []
    for trial in range(100):
        folder = tmp_path / str(trial)
        lost += killed_after(folder, rng.uniform(0.0, 2.5))
        shutil.rmtree(folder)
    record_property("kills", len(lost))  # type: ignore[operator]
    record_property("lost_seconds_max", max(lost))  # type: ignore[operator]
    assert max(lost) <= LOST_SECONDS


def test_a_file_that_may_not_grow_stops_the_tracing_and_not_the_training(tmp_path: Path) -> None:
    done = subprocess.run(
        command("limited", str(tmp_path), "200000"),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    check_stopped(done, tmp_path, "File too large")


def test_a_full_disk_stops_the_tracing_and_not_the_training(tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    script = (
        f'mount -t tmpfs -o size=300k none "{disk}" || exit 99; '
        f'"$@"; code=$?; cp -r "{disk}" "{kept}"; exit $code'
    )
    if shutil.which("unshare") is None:
        pytest.skip("no unshare command to mount a small disk with")
    done = subprocess.run(
        ["unshare", "--mount", "--user", "--map-root-user", "sh", "-c", script, "sh"]
        + command("full_disk", str(disk)),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"no small disk may be mounted here: {done.stderr.strip()}")
    check_stopped(done, kept, "No space left on device")


def check_stopped(done: subprocess.CompletedProcess[str], folder: Path, why: str) -> None:
    assert done.returncode == 0, done.stderr
    steps, listening, queued, failed = done.stdout.strip().split(maxsplit=3)
    assert int(steps) >= 250 and (listening, queued) == ("False", "0")
    assert why in failed
    assert done.stderr.count("tracing of rank 0 is off from here on, training goes on") == 1
    assert "Traceback" not in done.stderr
    rank = folder / "scan" / "rank-00000"
    trace = read_rank(rank)
    assert trace.damaged == (), "a block that did not fit is cut off again"
    assert len(trace.spans) > 100
    check_whole(trace.spans[trace.spans["kind"] == KIND["collective"]])
    assert segment_paths(rank)
    said = read_ended(rank, 0)
    assert said is not None and (said.how, said.iteration > 20) == ("failed", True) and why in said.why
