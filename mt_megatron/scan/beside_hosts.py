"""Slow groups with a member that its host hinders: a hop between others, told by the exits, is slow too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .exchanges import Label
from .findings import Finding
from .link_views import View, borders_of
from .slow_units import SlowUnit, Unit
from .step_table import StepTable
from .where_slow import WhereSlow

_HINDERS = ("host_contention", "host_pause")


def placed_beside_hosts(
    slow: Sequence[SlowUnit],
    judged: Sequence[Unit],
    table: StepTable,
    labels: Sequence[Label],
    late: Sequence[Finding],
) -> list[SlowUnit]:
    """``slow`` with the pair of those that a finding in ``late`` of a member's host might explain, where the
    exits name one without that member. What its own host does to it shows in the hops to and from it."""
    where = WhereSlow(judged, labels, table.places)
    unsound = {id(each.unit) for each in slow}
    found = []
    for each in slow:
        hindered = _hindered(each, late)
        if hindered and each.pair is None and len(each.unit.ranks) > 2:
            view = View(each, table.places)
            view.fit(labels, where, unsound, borders_of(each.unit, judged, unsound, table))
            if view.pair is not None and not hindered & set(view.pair):
                each = replace(each, pair=view.pair, trust=view.trust, said=view.sentence)
        found.append(each)
    return found


def _hindered(unit: SlowUnit, late: Sequence[Finding]) -> set[int]:
    return {
        rank
        for each in late
        if each.cause in _HINDERS and each.first_step <= unit.last_step and unit.first_step <= each.last_step
        for rank in each.ranks
        if rank in unit.unit.ranks
    }
