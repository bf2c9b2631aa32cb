"""Rings and all-to-alls with one slow way that nothing comparable runs beside: told by the exits alone.

In a sound ring of equal hops every member leaves at about the same time after the last arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.matched_ops import Label, Samples
from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.analysis.units import LEAST_EXTRA_NS, LEAST_LOSS, SlowUnit, Unit

from .hidden_links import BY_PATTERN, hidden_links
from .ring_patterns import Hops, RingFit, fit_pairs, fit_ring
from .where_slow import WhereSlow

LEAST_AMPLITUDE = 0.12
"""Between the first and the last exit, in units of the whole operation."""

LEAST_EXPLAINED = 0.85


def node_of(places: Mapping[int, Place], rank: int) -> str:
    """A name of the rank's node that sorts: number and host."""
    place = places.get(rank)
    return f"{place.node}/{place.host}" if place is not None else "?"


def node_borders(ranks: Sequence[int], places: Mapping[int, Place]) -> dict[Hops, str]:
    """For each node the hops of the ring of ``ranks`` that cross its border, where these are several.

    Two nodes have the same ones: then neither is there.
    """
    nodes = [node_of(places, rank) for rank in ranks]
    found: dict[Hops, list[str]] = {}
    for node in sorted(set(nodes)):
        inside = [each == node for each in nodes]
        hops = tuple(at for at in range(len(ranks)) if inside[at] != inside[(at + 1) % len(ranks)])
        if len(hops) > 1:
            found.setdefault(hops, []).append(node)
    return {hops: names[0] for hops, names in found.items() if len(names) == 1}


def crossing_hops(ranks: Sequence[int], places: Mapping[int, Place]) -> Hops:
    """The hops of the ring of ``ranks`` that lead from one node to another."""
    nodes = [node_of(places, rank) for rank in ranks]
    return tuple(at for at in range(len(ranks)) if nodes[at] != nodes[(at + 1) % len(nodes)])


def slow_rings(
    units: Sequence[Unit],
    known: Collection[int],
    iteration: NDArray[np.int64],
    step_ns: float,
    labels: Sequence[Label],
    places: Mapping[int, Place],
) -> list[SlowUnit]:
    """Groups in which one link is slow unseen by their whole times, and rings in which one hop, or those
    across one node's border, are slow in both halves of the steps.

    ``known``: ``id`` of the units that are known to be slow already.
    """
    where = WhereSlow(units, labels, places)
    found = hidden_links(units, known, iteration, step_ns, where)
    known = {*known, *(id(each.unit) for each in found)}
    for unit in units:
        if id(unit) in known or unit.samples is None:
            continue
        crossing = () if _even(unit, places) else crossing_hops(unit.ranks, places)
        if crossing and where.comparable(unit, int(iteration[0]), int(iteration[-1]), ()):
            # Its unequal hops are better known from the groups that lie alike.
            continue
        inside = (unit.samples.iteration >= iteration[0]) & (unit.samples.iteration <= iteration[-1])
        samples = unit.samples.take(inside)
        if len(samples.iteration) < 12:
            continue
        whole = float(np.nanmedian(np.nanmax(samples.exit, axis=1)))
        operations = float(unit.rows.count.sum()) / max(len(np.unique(unit.rows.iteration)), 1)
        # What cannot cost enough need not be fitted.
        if whole * operations < LEAST_LOSS * step_ns or whole < 2 * LEAST_EXTRA_NS:
            continue
        pair: tuple[int, int] | None = None
        told = ""
        op = labels[int(samples.label[0])][0]
        if "all_to_all" in op:
            if crossing:
                continue
            lost = _pair_loss(samples)
            if unit.clock_error > 0.3 * lost or lost < LEAST_EXTRA_NS:
                continue
        else:
            fit = _in_both_halves(samples, labels, list(node_borders(unit.ranks, places)), crossing)
            if fit is None or unit.clock_error > 0.3 * fit.amplitude * whole:
                continue
            lost = min(fit.lost_ns, 0.95 * whole)
            if len(fit.hops) == 1:
                pair = unit.ranks[fit.hops[0]], unit.ranks[(fit.hops[0] + 1) % len(unit.ranks)]
                told = (
                    f"the times at which the members leave the {op} of {unit.name} fit a slow hop from rank "
                    f"{pair[0]} to rank {pair[1]} ({100 * fit.explained:.0f} % of the pattern)"
                )
        if lost * operations < LEAST_LOSS * step_ns:
            continue
        found.append(
            SlowUnit(
                unit=unit,
                ratio=whole / (whole - lost),
                confidence=BY_PATTERN,
                first_step=int(samples.iteration.min()),
                last_step=int(samples.iteration.max()),
                lost_ns=lost * operations,
                extra_ns=lost,
                healthy_ns=whole - lost,
                by_past=False,
                pair=pair,
                trust=0.97,
                said=told,
            )
        )
    return found


def _even(unit: Unit, places: Mapping[int, Place]) -> bool:
    """Whether all hops of the ring are within nodes, or all between nodes: equal when sound."""
    return len(crossing_hops(unit.ranks, places)) in (0, len(unit.ranks))


def _in_both_halves(
    samples: Samples, labels: Sequence[Label], borders: Sequence[Hops], crossing: Hops
) -> RingFit | None:
    """The fit to all samples, if those of either half of the steps say about the same."""
    middle = int(np.median(samples.iteration))
    fitted = partial(fit_ring, labels=labels, healthy_ns=None, more=borders, crossing=crossing)
    whole = fitted(samples, least_amplitude=LEAST_AMPLITUDE)
    if whole is None or not _clear(whole):
        return None
    for half in (samples.iteration <= middle, samples.iteration > middle):
        fit = fitted(samples.take(half))
        if fit is None or not _clear(fit) or not set(fit.hops) & set(whole.hops):
            return None
    return whole


def _pair_loss(samples: Samples) -> float:
    """What two members, the same in both halves of the steps, leave an all-to-all later than all others;
    0 where no two do, or by less than the others take."""
    middle = int(np.median(samples.iteration))
    parts = [
        samples,
        *(samples.take(half) for half in (samples.iteration <= middle, samples.iteration > middle)),
    ]
    pairs, losses = set(), []
    for part in parts:
        if len(part.iteration) < 6:
            return 0.0
        ordered = np.sort(np.median(part.exit[np.isfinite(part.exit).all(axis=1)], axis=0))
        healthy = float(ordered[-3])
        pairs.add(fit_pairs(part, healthy))
        losses.append(float(ordered[-2]) - healthy)
        if losses[-1] < healthy:
            return 0.0
    return losses[0] if len(pairs) == 1 and None not in pairs else 0.0


def _clear(fit: RingFit) -> bool:
    return fit.accepted and fit.explained >= LEAST_EXPLAINED and fit.amplitude >= LEAST_AMPLITUDE
