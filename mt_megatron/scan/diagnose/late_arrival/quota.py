"""Ranks that a quota stops now and then: told by its counter, and by own work that is longer by as much.

Two facts that agree need no large slowdown: a quota that strikes in some steps only shows in few of them.
"""

from __future__ import annotations

import numpy as np

from mt_megatron.scan.analysis.raised_levels import merged_spikes, raised_levels
from mt_megatron.scan.analysis.robust import CLIP, Floats, spread
from mt_megatron.scan.analysis.step_table import StepTable, beside_peers
from mt_megatron.scan.findings.finding import Finding

from .late_finding import late_arrival

LEAST_SHARE = 0.015
"""Of the step: what is stopped for less is not told."""

SHOWS = 0.5
"""Of the time stopped, what own work must be longer by: a process that only waited loses nothing."""

LEAST_TOGETHER = 0.004
"""Of the step, the same where own work follows it step by step."""

FEWEST_TOGETHER = 8
SLOPES = (0.5, 1.5)
STEEP = 5.0
"""How own work has to follow: by about as much, and so many standard errors of the slope."""

SHORTEST = 3
"""Steps: a counter that nothing else moves needs no more."""

CONFIDENCE = 0.9


def short_of_quota(table: StepTable) -> list[Finding]:
    """Findings on ranks that their quota of processor time stops more than their peers."""
    throttled = table.columns["throttled_ns"]
    if not np.nansum(throttled) > 0:
        return []
    beside = beside_peers(throttled) if len(table.ranks) > 1 else throttled
    share = np.nan_to_num(beside / table.step_ns)
    tests = int(np.isfinite(throttled).sum()) * table.looks
    found = []
    for row in range(len(table.ranks)):
        stretch = _stretch(share, row, tests) if share[row].max() >= LEAST_SHARE else None
        if stretch is not None:
            stopped = float(beside[row, slice(*stretch)].mean())
            longer = _longer(table, row, *stretch)
            if stopped < LEAST_SHARE * table.step_ns or longer < SHOWS * stopped:
                stretch = None
        if stretch is None:
            stretch = _moves_with(table, row, np.nan_to_num(beside[row]))
            if stretch is None:
                continue
            stopped = longer = float(beside[row, slice(*stretch)].mean())
        found.append(_finding(table, row, *stretch, stopped, min(longer, stopped)))
    return found


def _stretch(share: Floats, row: int, tests: int) -> tuple[int, int] | None:
    """Where the quota stops the rank steadily, or again and again."""
    raised = raised_levels(
        share[row], least=LEAST_SHARE, tolerated=0.003, floor=0.005, tests=tests, shortest=SHORTEST
    )
    if raised:
        return raised[0].start, raised[-1].stop
    others = np.delete(share, row, axis=0)
    spikes = merged_spikes(share[row], others, least=2 * LEAST_SHARE, mean=LEAST_SHARE, fewest=4)
    return None if spikes is None else (spikes[0], spikes[1])


def _moves_with(table: StepTable, row: int, throttled: Floats) -> tuple[int, int] | None:
    """Where stops are too short to stand out from noise, but own work is longer step by step by just what
    the quota stopped: two counts that no chance makes equal. The first and the last of these steps."""
    hit = np.flatnonzero(throttled > 0.1 * max(throttled.max(), 1.0))
    if len(hit) < FEWEST_TOGETHER:
        return None
    start, stop = int(hit[0]), int(hit[-1]) + 1
    if throttled[start:stop].mean() < LEAST_TOGETHER * table.step_ns:
        return None
    own = _beside(table, row)
    there = np.isfinite(own)
    if there.sum() < 2 * FEWEST_TOGETHER:
        return None
    x, y = throttled[there] - throttled[there].mean(), own[there] - np.median(own[there])
    # One wild step must not make the line.
    y = np.clip(y, -CLIP * spread(y), CLIP * spread(y))
    square = float((x**2).sum())
    slope = float((x * y).sum()) / max(square, 1e-9)
    error = float(np.sqrt(((y - y.mean() - slope * x) ** 2).sum() / (there.sum() - 2) / max(square, 1e-9)))
    return (start, stop) if SLOPES[0] <= slope <= SLOPES[1] and slope >= STEEP * error else None


def _beside(table: StepTable, row: int) -> Floats:
    """Own work [steps] less that of its peers, if it has any."""
    compute: Floats = table.columns["compute"]
    peers = next(rows for rows in table.roles if row in rows)
    if len(peers) < 2:
        alone: Floats = compute[row]
        return alone
    beside: Floats = beside_peers(compute[peers])[int(np.flatnonzero(peers == row)[0])]
    return beside


def _longer(table: StepTable, row: int, start: int, stop: int) -> float:
    """ns a step by which its own work is longer there, than its peers' if it has any; or the whole step,
    where what the quota stopped was its part in a communication."""
    alone = not any(row in rows and len(rows) > 1 for rows in table.roles)
    found = [_grown(_beside(table, row), start, stop, needs_past=alone)]
    found.append(_grown(table.columns["step"][row], start, stop, needs_past=True))
    return max(found)


def _grown(series: Floats, start: int, stop: int, *, needs_past: bool) -> float:
    inside, outside = series[start:stop], np.concatenate((series[:start], series[stop:]))
    outside = outside[np.isfinite(outside)]
    if not np.isfinite(inside).any() or (needs_past and len(outside) < 4):
        return 0.0
    usual = float(np.median(outside)) if len(outside) >= 4 else 0.0
    return float(np.nanmean(inside)) - usual


def _finding(table: StepTable, row: int, start: int, stop: int, stopped: float, lost: float) -> Finding:
    rank = table.ranks[row]
    step = float(np.nanmean(table.columns["step"][:, start:stop]))
    return late_arrival(
        table,
        row,
        start,
        stop,
        cause="host_contention",
        lost_fraction=lost / step,
        confidence=CONFIDENCE,
        evidence=(
            f"its quota of processor time stopped rank {rank} for {stopped / 1e6:.1f} ms a step, and its own "
            f"work was longer by {lost / 1e6:.1f} ms or more",
        ),
        details={"shares": {"throttled": round(stopped / max(lost, 1.0), 3)}},
    )
