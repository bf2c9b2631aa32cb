"""Links that are slow though their group loses little: its other hops, or others' work, take as long.

Such a link costs nothing today and everything tomorrow. It shows in who leaves when: beside the same group's
exits before it became slow, or beside those of groups that lie alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.change_points import SHORTEST, stretches
from mt_megatron.scan.analysis.matched_ops import Samples
from mt_megatron.scan.analysis.robust import Floats
from mt_megatron.scan.analysis.units import LEAST_EXTRA_NS, LEAST_LOSS, SlowUnit, Unit

from .where_slow import Located, WhereSlow

LEAST_GAIN = 20.0
"""Squared standard errors; more than where a group is known to be slow: many groups and times are tried."""

LEAST_EXPLAINED = 0.9
"""Of the difference, likewise: other faults of the run change when members come."""

LEAST_GAIN_HALF = 6.0
"""The same in either half of the steps, where there is no other time to compare with."""

CONFIDENT, HARMLESS = 0.95, 0.7
"""Trust where it costs something, and where it does not: too little for an alert."""

BY_PATTERN = 0.93
"""Confidence where only a pattern of exits tells of a slow link: set, not the outcome of a test."""

MOST_UNITS, MOST_MEMBERS = 96, 16
"""A look at a group takes some hundredths of a second, and grows with its members' cube."""

_FLOOR = 0.02
_MOST_PERIODS = 6


def hidden_links(
    units: Sequence[Unit],
    known: Collection[int],
    iteration: NDArray[np.int64],
    step_ns: float,
    where: WhereSlow,
) -> list[SlowUnit]:
    """Units in which a link is slow, other than those ``known`` (by ``id``) to be slow."""
    found: list[SlowUnit] = []
    for unit in _costliest(units, known, LEAST_LOSS * step_ns * len(iteration)):
        best: tuple[Located, int, int] | None = None
        for first, last in _periods(unit, iteration):
            located = _located(unit, first, last, iteration, known, where)
            if located is not None and (best is None or located.explanation.gain > best[0].explanation.gain):
                best = located, first, last
        if best is not None:
            found.append(_slow_unit(unit, *best, step_ns))
    return found


def _costliest(units: Sequence[Unit], known: Collection[int], least_ns: float) -> list[Unit]:
    """Those whose operations take ``least_ns`` in all at least."""
    judged = []
    for each in units:
        if id(each) in known or each.samples is None or len(each.ranks) > MOST_MEMBERS:
            continue
        taken = float((each.rows.time * each.rows.count).sum())
        if taken >= least_ns:
            judged.append((taken, each))
    judged.sort(key=lambda each: -each[0])
    return [each for _, each in judged[:MOST_UNITS]]


def _located(
    unit: Unit,
    first: int,
    last: int,
    iteration: NDArray[np.int64],
    known: Collection[int],
    where: WhereSlow,
) -> Located | None:
    located = where.find(unit, first, last, unsound=known)
    if located is None or located.pair is None or located.explanation.gain < LEAST_GAIN:
        return None
    if located.explanation.explained < LEAST_EXPLAINED:
        return None
    if located.slowness_ns < max(LEAST_EXTRA_NS, 2.0 * unit.clock_error):
        return None
    if not located.by_past:
        middle = int(iteration[len(iteration) // 2])
        for start, stop in ((first, min(middle - 1, last)), (max(middle, first), last)):
            half = where.find(unit, start, stop, unsound=known, least_gain=LEAST_GAIN_HALF, only_like=True)
            if half is None or half.pair != located.pair:
                return None
    return located


def _periods(unit: Unit, iteration: NDArray[np.int64]) -> list[tuple[int, int]]:
    """First and last steps between which some member's exits are later than otherwise; and all steps."""
    found = {(int(iteration[0]), int(iteration[-1]))}
    for samples in (unit.samples, *unit.others):
        assert samples is not None
        for series in _by_step(samples, iteration):
            cut = stretches(series, floor=_FLOOR)
            if not cut:
                continue
            for lower, upper in zip((None, *cut[:-1]), cut, strict=True):
                if lower is None or upper.level <= lower.level or upper.stop - upper.start < SHORTEST:
                    continue
                # To the end of what is raised: a level may rise in two steps.
                stop = upper.stop
                for each in cut:
                    if each.start == stop and each.level > lower.level:
                        stop = each.stop
                found.add((int(iteration[upper.start]), int(iteration[stop - 1])))
            if len(cut) > 1 and cut[0].level > cut[1].level and cut[0].stop >= SHORTEST:
                found.add((int(iteration[0]), int(iteration[cut[0].stop - 1])))
    return sorted(found)[:_MOST_PERIODS]


def _by_step(samples: Samples, iteration: NDArray[np.int64]) -> Floats:
    """Logarithms of each member's middle exit, [members, steps]."""
    found = np.full((samples.exit.shape[1], len(iteration)), np.nan)
    exits = np.log(np.maximum(samples.exit.astype(np.float64), 1.0))
    for at, step in enumerate(iteration.tolist()):
        rows = exits[samples.iteration == step]
        if len(rows):
            found[:, at] = np.median(rows, axis=0)
    return found


def _slow_unit(unit: Unit, located: Located, first: int, last: int, step_ns: float) -> SlowUnit:
    assert located.pair is not None and unit.samples is not None
    inside = (unit.rows.iteration >= first) & (unit.rows.iteration <= last)
    steps = max(len(np.unique(unit.rows.iteration[inside])), 1)
    operations = float(unit.rows.count[inside].sum()) / steps
    whole = float(np.nanmedian(np.nanmax(unit.samples.exit, axis=1)))
    extra = min(max(float(located.explanation.later.max()), 0.0), 0.95 * whole)
    lost = extra * operations
    harmless = lost < LEAST_LOSS * step_ns
    return SlowUnit(
        unit=unit,
        ratio=whole / max(whole - extra, 0.05 * whole),
        confidence=BY_PATTERN,
        first_step=first,
        last_step=last,
        lost_ns=lost,
        extra_ns=extra,
        healthy_ns=whole - extra,
        by_past=located.by_past,
        pair=located.pair,
        trust=HARMLESS if harmless else CONFIDENT,
        said=said(unit, located),
    )


def said(unit: Unit, located: Located) -> str:
    """The evidence in a sentence."""
    assert located.pair is not None
    one, other = located.pair
    beside = "before" if located.by_past else "in groups that lie alike"
    if "all_to_all" in located.op:
        what = f"only ranks {one} and {other} leave the {located.op} of {unit.name} later than {beside}"
    else:
        what = (
            f"beside those {beside}, the times at which members leave the {located.op} of {unit.name} fit "
            f"a slow hop from rank {one} to rank {other}"
        )
    return f"{what} ({100 * located.explanation.explained:.0f} % of the difference)"
