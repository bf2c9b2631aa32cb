"""Ranks that a quota stops now and then: told by its counter, and by own work that is longer by as much.

Two facts that agree need no large slowdown: a quota that strikes in some steps only shows in few of them.
"""

from __future__ import annotations

import numpy as np

from .findings import Finding
from .raised_levels import merged_spikes, raised_levels
from .step_table import StepTable, beside_peers

LEAST_SHARE = 0.015
"""Of the step: what is stopped for less is not told."""

SHOWS = 0.5
"""Of the time stopped, what own work must be longer by: a process that only waited loses nothing."""

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
        if share[row].max() < LEAST_SHARE:
            continue
        raised = raised_levels(share[row], least=LEAST_SHARE, tolerated=0.003, floor=0.005, tests=tests)
        if raised:
            start, stop = raised[0].start, raised[-1].stop
        else:
            others = np.delete(share, row, axis=0)
            spikes = merged_spikes(share[row], others, least=2 * LEAST_SHARE, mean=LEAST_SHARE, fewest=4)
            if spikes is None:
                continue
            start, stop = spikes[0], spikes[1]
        stopped = float(beside[row, start:stop].mean())
        longer = _longer(table, row, start, stop)
        if stopped < LEAST_SHARE * table.step_ns or longer < SHOWS * stopped:
            continue
        found.append(_finding(table, row, start, stop, stopped, min(longer, stopped)))
    return found


def _longer(table: StepTable, row: int, start: int, stop: int) -> float:
    """ns a step by which its own work is longer there: than its peers', if it has any."""
    compute = table.columns["compute"]
    peers = next(rows for rows in table.roles if row in rows)
    if len(peers) > 1:
        difference = beside_peers(compute[peers])[int(np.flatnonzero(peers == row)[0])]
    else:
        difference = compute[row]
    inside = difference[start:stop]
    outside = np.concatenate((difference[:start], difference[stop:]))
    outside = outside[np.isfinite(outside)]
    usual = float(np.median(outside)) if len(outside) >= 4 else 0.0
    if len(peers) < 2 and len(outside) < 4:
        return 0.0
    return float(np.nanmean(inside)) - usual if np.isfinite(inside).any() else 0.0


def _finding(table: StepTable, row: int, start: int, stop: int, stopped: float, lost: float) -> Finding:
    rank = table.ranks[row]
    first, last = table.steps(start, stop)
    step = float(np.nanmean(table.columns["step"][:, start:stop]))
    return Finding(
        cause="host_contention",
        lateness="late_arrival",
        ranks=(rank,),
        host=table.host(rank),
        first_step=first,
        last_step=last,
        lost_fraction=min(lost / step, 1.0),
        confidence=CONFIDENCE,
        evidence=(
            f"its quota of processor time stopped rank {rank} for {stopped / 1e6:.1f} ms a step, and its own "
            f"work was longer by {lost / 1e6:.1f} ms or more",
        ),
        details={"shares": {"throttled": round(stopped / max(lost, 1.0), 3)}},
    )
