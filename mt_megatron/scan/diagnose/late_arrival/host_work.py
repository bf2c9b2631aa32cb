"""Ranks that compute on their host's processors: the same work is slow there when it uses more of their time.

How long own work takes tells little on a busy host, where every rank waits for a processor now and then; how
much processor time it used hardly depends on who else wants one.
"""

from __future__ import annotations

from math import exp, log

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.raised_levels import Raised, beyond_noise, raised_levels
from mt_megatron.scan.analysis.robust import Floats
from mt_megatron.scan.analysis.step_table import StepTable, beside_peers
from mt_megatron.scan.findings.finding import Finding

from .causes import USED_SHARE, usual_wait
from .late_finding import late_arrival
from .stages import above_past

LEAST = log(1.35)
"""Caches and sibling threads are shared: less than this may be a neighbour's doing."""

TOLERATED = log(1.08)
FLOOR = 0.02

LEAST_WAITS = log(4.0)
TOLERATED_WAITS = log(1.5)
FLOOR_WAITS = 0.15
"""The same of waits for a processor, which vary far more."""

LEAST_OF_STEP = 0.25
"""By which the steps must have become longer for these waits to matter."""


def starved_on_host(table: StepTable) -> list[Finding]:
    """Findings on ranks that wait for a processor several times as long as before and as the others, in steps
    that became longer: told by the waits alone, whether own work or communications had to wait."""
    waited, used = table.columns["run_queue_wait_ns"], table.columns["process_cpu_ns"]
    if not _on_host(table) or len(table.ranks) < 2 or not np.nansum(waited) > 0:
        return []
    # Waits shorter than a tenth of what the process ran are nothing, however many times as long.
    least = 0.1 * float(np.nanmedian(used))
    logs = np.log(np.where(np.isfinite(waited), np.maximum(waited, least), np.nan))
    beside = beside_peers(logs)
    tests = int(np.isfinite(waited).sum()) * table.looks
    found = []
    for row in range(len(table.ranks)):
        changed = above_past(beside[row], least=LEAST_WAITS, tests=tests, floor=FLOOR_WAITS)
        for raised in changed:
            longer = _grown(table.columns["step"][row], raised)
            more = _grown(waited[row], raised)
            if longer is None or more is None or (_grown(logs[row], raised) or 0.0) < 0.5 * raised.level:
                continue
            step = float(np.nanmedian(table.columns["step"][row, raised.start : raised.stop]))
            usual = usual_wait(table, *table.steps(raised.start, raised.stop))
            if longer >= LEAST_OF_STEP * step and more >= max(usual, 0.5 * longer):
                found.append(_starved(table, row, raised, longer / step, more))
    return found


def _starved(table: StepTable, row: int, raised: Raised, lost: float, more: float) -> Finding:
    rank = table.ranks[row]
    return late_arrival(
        table,
        row,
        raised.start,
        raised.stop,
        cause="host_contention",
        lost_fraction=lost,
        confidence=raised.confidence,
        evidence=(
            f"the threads of rank {rank} waited {more / 1e6:.0f} ms a step more for a processor than before, "
            f"{exp(raised.level):.1f} times as long beside others ({beyond_noise(raised)}), "
            f"and steps became {100 * lost / max(1.0 - lost, 0.01):.0f} % longer",
        ),
        details={"certainty": round(raised.certainty, 2)},
    )


def _on_host(table: StepTable) -> bool:
    with np.errstate(all="ignore"):
        on_host = np.nanmin(table.columns["on_host"], axis=1) > 0
    return bool(on_host.all()) and bool(np.nansum(table.columns["process_cpu_ns"]) > 0)


def slow_on_host(table: StepTable) -> list[Finding]:
    """Findings on ranks that use more processor time than their peers, or alone in a stage than before."""
    used, compute = table.columns["process_cpu_ns"], table.columns["compute"]
    if not _on_host(table):
        return []
    logs = np.log(np.where(used > 0, used, np.nan))
    tests = int(np.isfinite(used).sum()) * table.looks
    found = []
    for rows in table.roles:
        for row in rows:
            for raised in _raised(logs, int(row), rows, tests):
                lost = float(np.nanmean(used[row, raised.start : raised.stop])) * (1.0 - exp(-raised.level))
                grown = _grown(compute[row], raised)
                # More that is used beside own work, such as by a thread that encodes, costs the run nothing;
                # and where own work grew by far more, something else is wrong than the work.
                if grown is None or 0.5 * lost <= grown <= lost / USED_SHARE:
                    found.append(_finding(table, int(row), raised, lost))
    return found


def _raised(logs: Floats, row: int, rows: NDArray[np.int64], tests: int) -> list[Raised]:
    if len(rows) > 1:
        beside = beside_peers(logs[rows])[int(np.flatnonzero(rows == row)[0])]
        return raised_levels(beside, least=LEAST, tolerated=TOLERATED, floor=FLOOR, tests=tests)
    everybody = beside_peers(logs)[row] if len(logs) > 1 else logs[row]
    changed = above_past(everybody, least=LEAST, tests=tests, floor=FLOOR)
    # Where the others came to use less it is not this one that came to use more.
    return [each for each in changed if (_grown(logs[row], each) or 0.0) >= 0.5 * each.level]


def _grown(series: Floats, raised: Raised) -> float | None:
    """Its median in the stretch less that of the other steps; None where these are few."""
    inside = series[raised.start : raised.stop]
    outside = np.concatenate((series[: raised.start], series[raised.stop :]))
    if np.isfinite(outside).sum() < 4 or not np.isfinite(inside).any():
        return None
    return float(np.nanmedian(inside) - np.nanmedian(outside))


def _finding(table: StepTable, row: int, raised: Raised, lost: float) -> Finding:
    rank = table.ranks[row]
    step = float(np.nanmean(table.columns["step"][:, raised.start : raised.stop]))
    used = float(np.nanmean(table.columns["process_cpu_ns"][row, raised.start : raised.stop]))
    return late_arrival(
        table,
        row,
        raised.start,
        raised.stop,
        cause="slow_compute",
        lost_fraction=lost / step,
        confidence=raised.confidence,
        evidence=(
            f"rank {rank} used {used / 1e6:.0f} ms of its processors' time a step, "
            f"{100 * (exp(raised.level) - 1):.0f} % more than usual ({beyond_noise(raised)})",
        ),
        details={"slowdown": round(exp(raised.level) - 1, 4), "certainty": round(raised.certainty, 2)},
    )
