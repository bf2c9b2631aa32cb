"""Slow transfers that a member's host explains: who gets no processor does not transfer either."""

from __future__ import annotations

from collections.abc import Sequence

from .findings import Finding
from .slow_units import SlowUnit, Unit
from .step_table import StepTable

MOST = 0.5
"""A host that hinders slows most of what its rank takes part in."""

PLAINLY = 3.0
"""Transfers that lose so many times what the rank's own work loses have another reason."""


def without_starved(
    slow: Sequence[SlowUnit], judged: Sequence[Unit], table: StepTable, late: Sequence[Finding]
) -> list[SlowUnit]:
    """``slow`` without those that a finding in ``late`` explains."""
    kept = list(slow)
    for finding in late:
        if finding.cause not in ("host_contention", "host_pause"):
            continue
        for rank in finding.ranks:
            mine = [each for each in kept if rank in each.unit.ranks and _overlap(each, finding)]
            partners = {_others(each, rank) for each in judged if rank in each.ranks}
            hindered = {_others(each.unit, rank) for each in mine}
            if len(partners) > 1 and len(hindered) <= MOST * len(partners):
                continue
            most = PLAINLY * finding.lost_fraction * table.step_ns
            kept = [each for each in kept if each not in mine or each.lost_ns > most]
    return kept


def _others(unit: Unit, rank: int) -> frozenset[int]:
    return frozenset(unit.ranks) - {rank}


def _overlap(unit: SlowUnit, finding: Finding) -> bool:
    return unit.first_step <= finding.last_step and finding.first_step <= unit.last_step
