"""Slow transfers that a member's host explains: who gets no processor does not transfer either."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.robust import Floats
from mt_megatron.scan.analysis.step_table import StepTable
from mt_megatron.scan.analysis.units import SlowUnit, Unit
from mt_megatron.scan.diagnose.late_arrival.causes import FEWEST_BEFORE, usual_wait
from mt_megatron.scan.findings.finding import Finding

HINDERS = ("host_contention", "host_pause")
"""Causes for which a rank transfers slowly as well."""

MOST = 0.5
"""A host that hinders slows most of what its rank takes part in."""

OF_USUAL_WAITS = 0.5
"""Of what the ranks usually wait for a processor, what transfers must lose to be worth a name."""

PLAINLY = 3.0
"""Transfers that lose so many times what the rank's own work loses have another reason."""


def without_starved(
    slow: Sequence[SlowUnit], judged: Sequence[Unit], table: StepTable, late: Sequence[Finding]
) -> list[SlowUnit]:
    """``slow`` without those that a finding in ``late`` explains."""
    kept = list(slow)
    for finding in late:
        if finding.cause not in HINDERS:
            continue
        for rank in finding.ranks:
            mine = [each for each in kept if rank in each.unit.ranks and overlap(each, finding)]
            partners = {_others(each, rank) for each in judged if rank in each.ranks}
            hindered = {_others(each.unit, rank) for each in mine}
            if len(partners) > 1 and len(hindered) <= MOST * len(partners):
                continue
            most = PLAINLY * finding.lost_fraction * table.step_ns
            # Where exits say which pair is slow, another member's host has no part in it.
            kept = [
                each
                for each in kept
                if each not in mine
                or each.lost_ns > most
                or (each.pair is not None and rank not in each.pair)
            ]
    return kept


_WAITED_FOR = {"slow_data": "data", "slow_checkpoint": "checkpoint"}

EXPLAINED = 0.5
"""Of what a slow unit loses: where its members' waits for a processor grew by as much, the wire is not to
blame. A transfer ends when its receiver runs and goes on when its sender does."""


def beyond_waits(slow: Sequence[SlowUnit], table: StepTable) -> list[SlowUnit]:
    """``slow`` without those in whose steps the members had to wait that much longer for a processor.

    What each rank knows of itself decides: run queue, quota, stops. A unit that was compared with others is
    judged by what its members waited more than the other ranks in the same steps, one that was
    compared with its past by what they waited more than before.
    """
    held = _held(table)
    return [
        each
        for each in slow
        if _explained(each, table, held) < EXPLAINED * each.lost_ns
        and each.lost_ns >= OF_USUAL_WAITS * usual_wait(table, each.first_step, each.last_step)
    ]


def beyond_own_waits(found: Sequence[Finding], table: StepTable) -> list[Finding]:
    """``found`` without waits for data and slow checkpoints of ranks that were kept from running for as much
    longer in the same steps: who gets no processor reads and writes slowly too."""
    held = _held(table)
    kept = []
    for each in found:
        column = _WAITED_FOR.get(each.cause)
        rows = [table.ranks.index(rank) for rank in each.ranks if rank in table.ranks]
        if column is None or len(rows) != 1:
            kept.append(each)
            continue
        took = np.nan_to_num(table.columns[column])
        inside = (table.iteration >= each.first_step) & (table.iteration <= each.last_step)
        inside &= took[rows[0]] > 0
        others = np.setdiff1d(np.arange(len(table.ranks)), rows)
        longer = _longer(took, rows[0], others, inside, by_past=True)
        # More than before and more than the others meanwhile.
        kept_from = min(_longer(held, rows[0], others, inside, by_past=past) for past in (True, False))
        if kept_from < EXPLAINED * longer:
            kept.append(each)
    return kept


def _longer(
    values: Floats, row: int, others: NDArray[np.intp], inside: NDArray[np.bool_], *, by_past: bool
) -> float:
    if not inside.any():
        return 0.0
    return float(values[row, inside].mean()) - _usual(values, row, others, inside, by_past)


def _held(table: StepTable) -> Floats:
    """ns of each rank and step [ranks, steps] in which threads of it were kept from running; the ways to be
    kept overlap, the longest counts."""
    names = ("run_queue_wait_ns", "throttled_ns", "pause")
    found: Floats = np.max([np.nan_to_num(table.columns[name]) for name in names], axis=0)
    return found


def _explained(each: SlowUnit, table: StepTable, held: Floats) -> float:
    inside = (table.iteration >= each.first_step) & (table.iteration <= each.last_step)
    rows = [table.ranks.index(rank) for rank in each.pair or each.unit.ranks if rank in table.ranks]
    if not inside.any():
        return 0.0
    others = np.setdiff1d(np.arange(len(table.ranks)), rows)
    total = 0.0
    for row in rows:
        usual = _usual(held, row, others, inside, each.by_past)
        total += max(float(held[row, inside].mean()) - usual, 0.0)
    return total


def _usual(
    held: Floats, row: int, others: NDArray[np.intp], inside: NDArray[np.bool_], by_past: bool
) -> float:
    before = held[row, ~inside]
    if by_past and len(before) >= FEWEST_BEFORE:
        return float(np.median(before))
    if len(others):
        return float(np.median(held[others][:, inside]))
    return float(np.median(before)) if len(before) >= FEWEST_BEFORE else 0.0


def _others(unit: Unit, rank: int) -> frozenset[int]:
    return frozenset(unit.ranks) - {rank}


def overlap(unit: SlowUnit, finding: Finding) -> bool:
    """Whether they share steps."""
    return unit.first_step <= finding.last_step and finding.first_step <= unit.last_step
