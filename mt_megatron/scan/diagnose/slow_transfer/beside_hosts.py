"""Slow groups with a member that its host hinders: a hop between others, told by the exits, is slow too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mt_megatron.scan.analysis.matched_ops import Label
from mt_megatron.scan.analysis.step_table import StepTable
from mt_megatron.scan.analysis.units import SlowUnit, Unit
from mt_megatron.scan.diagnose.hops.where_slow import WhereSlow
from mt_megatron.scan.findings.finding import Finding

from .link_views import View, borders_of
from .links import MOST_FITS
from .starved import HINDERS, overlap


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
    unplaced = [
        each for each in slow if each.pair is None and len(each.unit.ranks) > 2 and _hindered(each, late)
    ]
    costly = {id(each) for each in sorted(unplaced, key=lambda each: -each.lost_ns)[:MOST_FITS]}
    found = []
    for each in slow:
        if id(each) in costly:
            view = View(each, table.places)
            view.fit(labels, where, unsound, borders_of(each.unit, judged, unsound, table))
            if view.pair is not None and not _hindered(each, late) & set(view.pair):
                each = replace(each, pair=view.pair, trust=view.trust, said=view.sentence)
        found.append(each)
    return found


def _hindered(unit: SlowUnit, late: Sequence[Finding]) -> set[int]:
    ranks = {rank for each in late if each.cause in HINDERS and overlap(unit, each) for rank in each.ranks}
    return ranks & set(unit.unit.ranks)
