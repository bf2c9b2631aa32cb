"""Links that only a pattern of exits tells of, beside another fault that changes when members come.

Who comes later leaves later, and so do those who wait for it. How much of that passes on is a model's word:
where something else is known to have changed at the same time, it is more likely than a second fault.
"""

from __future__ import annotations

from collections.abc import Sequence

from mt_megatron.scan.analysis.units import SlowUnit
from mt_megatron.scan.findings.finding import Finding

NEAR = 2
"""Steps between the beginnings of what began together."""

PLAINLY = 1.3
"""Beside another fault a group has to take so many times as long."""


def without_side_effects(slow: Sequence[SlowUnit], late: Sequence[Finding]) -> list[SlowUnit]:
    """``slow`` without what another fault explains: units whose whole times are sound (``certainty`` None),
    where the pair has a rank that comes ``late`` in these steps, where the steps that were compared are those
    with and those without something else, or where little is lost beside it.
    """
    others = [(each.first_step, each.last_step) for each in late]
    others += [(each.first_step, each.last_step) for each in slow if each.certainty is not None]
    return [each for each in slow if each.certainty is not None or not _explained(each, late, others)]


def _explained(unit: SlowUnit, late: Sequence[Finding], others: Sequence[tuple[int, int]]) -> bool:
    ends = (unit.first_step, unit.last_step + 1)
    if unit.by_past and any(abs(end - began) <= NEAR for end in ends for began, _ in others):
        return True
    beside = any(first <= unit.last_step and unit.first_step <= last for first, last in others)
    if beside and unit.ratio < PLAINLY:
        return True
    return any(
        each.first_step <= unit.last_step
        and unit.first_step <= each.last_step
        and set(each.ranks) & set(unit.pair or ())
        for each in late
    )
