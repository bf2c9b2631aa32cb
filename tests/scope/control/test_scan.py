"""Trace and diagnosis of a run that stands still by command."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.errors import ScanError
from mt_megatron.scan.analysis.step_features import rank_steps
from mt_megatron.scan.diagnose.rank_ends import rank_end
from mt_megatron.scan.format.segments import read_rank
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.seams import events
from tests.launch import run_ranks


def test_a_commanded_pause_is_no_time_of_a_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0)
    recorder.start()
    for iteration in (1, 2, 3):
        with events.span("step", iteration=iteration):
            time.sleep(0.01)
        if iteration == 2:
            with events.span("pause", op="commanded"):
                time.sleep(1.0)
    recorder.close()
    found = rank_steps(0, read_rank(tmp_path / "scan" / "rank-00000"))
    assert found.iteration.tolist() == [1, 2, 3]
    # Collections of garbage and late beats within it are pauses of their own.
    assert np.nanmax(found.columns["pause"]) < 0.5e9 and np.nanmax(found.columns["longest_pause"]) < 0.5e9


def test_a_rank_that_is_paused_is_seen_to_be(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0)
    recorder.start()
    with events.span("step", iteration=1):
        pass
    with events.span("pause", op="commanded"):
        until = time.monotonic() + 20
        inside = None
        while inside is None and time.monotonic() < until:
            time.sleep(0.2)
            # Nothing is written in the first moment.
            with contextlib.suppress(ScanError):
                inside = rank_end(0, read_rank(tmp_path / "scan" / "rank-00000"), lambda times: times).inside
    recorder.close()
    assert inside == "pause"


@pytest.mark.daily
def test_neither_watchdog_nor_hang_detector_takes_a_pause_for_a_hang(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = run_ranks(
        2, "tests.scope.control.run_cases:watched", str(tmp_path), 12.0, timeout=240
    )
    for each in found:
        assert each["run"]["error"] is None and each["run"]["finished"], each["run"]
        assert each["run"]["problems"] == []
        assert each["run"]["digest"] == each["alone"]["digest"]
    assert found[0]["seconds"] >= 12 and found[0]["findings"] == []
