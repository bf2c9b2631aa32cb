"""Slow transfers: the smallest set of links, node borders and groups that explains all slow units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .exchanges import Label, Samples
from .findings import Cause, Finding
from .ring_patterns import fit_pairs, fit_ring
from .slow_rings import crossing_hops, node_borders, node_of
from .slow_units import LEAST_LOSS, SlowUnit, Unit
from .step_table import StepTable
from .trace import Place

NODE_SHARE = 0.7
"""Of the units that cross a node's border, so many must be slow to blame its border."""

MOST_FITS = 24

LEAST_SPREAD = 0.12
"""Of what a ring loses by one slow hop, its members' exits differ by this at least."""

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class _Blame:
    cause: Cause
    ranks: tuple[int, ...]
    host: str | None
    units: tuple[SlowUnit, ...]
    trust: float
    evidence: tuple[str, ...] = ()


def slow_links(
    slow: Sequence[SlowUnit], judged: Sequence[Unit], table: StepTable, labels: Sequence[Label]
) -> list[Finding]:
    """Findings that explain ``slow``, of the units ``judged`` in all."""
    # Of very many alike the costliest tell enough: each fit takes a tenth of a second.
    costly = sorted(slow, key=lambda each: -each.lost_ns)[:MOST_FITS]
    fitted = {id(each) for each in costly}
    views = [_View(each, labels, table.places, fit=id(each) in fitted) for each in slow]
    blames: list[_Blame] = []
    while (node := _node(views, judged, table)) is not None:
        # Rings across that border whose pattern told nothing are explained as well.
        border = set(node.ranks)
        inherits = [
            each
            for each in views
            if each.pair is None and 0 < len(border & set(each.slow.unit.ranks)) < len(each.slow.unit.ranks)
        ]
        units = {id(unit): unit for unit in (*node.units, *(each.slow for each in inherits))}
        blames.append(replace(node, units=tuple(units.values())))
        views = [each for each in views if id(each.slow) not in units]
    everywhere = [each.slow for each in views if each.slow.everywhere]
    views = [each for each in views if not each.slow.everywhere]
    blames += _everywhere(everywhere)
    pairs = _pairs(views)
    blames += pairs
    explained = {id(unit) for blame in pairs for unit in blame.units}
    blames += _groups([each.slow for each in views if id(each.slow) not in explained], bool(blames))
    return [_finding(blame, table) for blame in blames]


def _node(views: Sequence[_View], judged: Sequence[Unit], table: StepTable) -> _Blame | None:
    """The node whose border most slow units cross, if most that cross it are slow."""
    places = table.places
    nodes = sorted({node_of(places, rank) for unit in judged for rank in unit.ranks})
    if len(nodes) < 2 or not views:
        return None
    ratio = sorted(each.slow.ratio for each in views)[len(views) // 2]
    found: list[tuple[tuple[int, float], str, list[_View]]] = []
    for node in nodes:
        here = [each for each in views if node in each.nodes]
        different = {_identity(each.slow.unit) for each in here}
        told = any(each.border == node for each in here)
        # What is too rare to show its slowness speaks neither for nor against the node.
        crossing = different | {
            _identity(unit)
            for unit in judged
            if _crosses(unit, node, places)
            and _cost(unit, table) * (1.0 - 1.0 / ratio) > 2 * LEAST_LOSS * table.step_ns
        }
        if len(different) < (1 if told else 2) or len(different) < NODE_SHARE * len(crossing):
            continue
        if _one_pair(here):
            continue
        # What is slow at another node's side of the same ways is fewer: the most explained is the cause.
        found.append(((len(different), len(different) / len(crossing)), node, here))
    if not found:
        return None
    best = max(found, key=lambda each: each[0])
    tied = [each[1] for each in found if each[0] == best[0]]
    if len(tied) > 2:
        return None
    units = tuple(each.slow for each in best[2])
    ranks = tuple(sorted(rank for rank in places if node_of(places, rank) in tied))
    said = [
        f"{len({_identity(each.unit) for each in units})} groups and edges that cross its border are slow"
    ]
    if len(tied) > 1:
        said.append("all of them join the same two nodes: which of these is at fault cannot be told")
    return _Blame(
        cause="slow_node_link",
        ranks=ranks,
        host=" or ".join(_host(places, node) for node in tied),
        units=units,
        # Of the only two either will do; else half of the places named would be wrong.
        trust=1.0 if len(tied) == 1 else 0.75 if len(nodes) == 2 else 0.48,
        evidence=tuple(said),
    )


class _View:
    """A slow unit, and what the pattern of its exits says of where it is slow."""

    def __init__(
        self, slow: SlowUnit, labels: Sequence[Label], places: Mapping[int, Place], *, fit: bool
    ) -> None:
        self.slow = slow
        self.pair: Pair | None = None
        self.border: str | None = None
        self.sentence = ""
        self.trust = 1.0
        ranks = slow.unit.ranks
        if len(ranks) == 2:
            self.pair = _pair(*ranks)
        elif fit:
            self._fit(labels, places)
        concerned = ranks if self.pair is None else self.pair
        crossed = {node_of(places, rank) for rank in concerned}
        self.nodes = {self.border} if self.border is not None else crossed if len(crossed) > 1 else set()
        """Nodes whose border may be the slow place."""

    def _fit(self, labels: Sequence[Label], places: Mapping[int, Place]) -> None:
        unit = self.slow.unit
        if unit.samples is None or unit.clock_error > 0.3 * self.slow.extra_ns:
            return
        samples = _during(unit.samples, self.slow)
        if not len(samples.iteration):
            return
        ranks = unit.ranks
        op = labels[int(samples.label[0])][0]
        if "all_to_all" in op:
            found = fit_pairs(samples, self.slow.healthy_ns)
            if found is not None:
                self.pair, self.trust = _pair(ranks[found[0]], ranks[found[1]]), 0.9
                self.sentence = f"only these two leave the {op} of {unit.name} late"
            return
        borders = node_borders(ranks, places)
        share = self.slow.extra_ns / (self.slow.extra_ns + self.slow.healthy_ns)
        fit = fit_ring(
            samples,
            labels,
            self.slow.healthy_ns,
            list(borders),
            least_amplitude=LEAST_SPREAD * share,
            crossing=crossing_hops(ranks, places),
        )
        if fit is None or not fit.accepted:
            return
        if fit.hops in borders:
            self.border = borders[fit.hops]
            return
        sender = ranks[fit.hops[0]]
        receiver = ranks[(fit.hops[0] + 1) % len(ranks)]
        self.pair, self.trust = _pair(sender, receiver), 0.97
        self.sentence = (
            f"the times at which the members leave the {op} of {unit.name} fit a slow hop from rank {sender} "
            f"to rank {receiver} ({100 * fit.explained:.0f} % of the pattern; the error of the next best hop "
            f"is {1.0 / max(fit.against_second, 1e-3):.0f} times as large)"
        )


def _cost(unit: Unit, table: StepTable) -> float:
    """ns per step that its operations take."""
    inside = (unit.rows.iteration >= table.iteration[0]) & (unit.rows.iteration <= table.iteration[-1])
    return float((unit.rows.time[inside] * unit.rows.count[inside]).sum()) / len(table.iteration)


def _host(places: Mapping[int, Place], node: str) -> str:
    return node.partition("/")[2] or f"node {node.partition('/')[0]}"


def _crosses(unit: Unit, node: str, places: Mapping[int, Place]) -> bool:
    inside = [node_of(places, rank) == node for rank in unit.ranks]
    return any(inside) and not all(inside)


def _identity(unit: Unit) -> tuple[int, ...]:
    """Both directions of an edge, and groups of the same ranks, are one thing."""
    return tuple(sorted(unit.ranks))


def _one_pair(views: Sequence[_View]) -> bool:
    """Whether one pair of ranks is part of all of them, and the only one that is."""
    common = set(views[0].slow.unit.ranks)
    for each in views[1:]:
        common &= set(each.slow.unit.ranks)
    return len(common) >= 2 and any(each.pair is not None for each in views)


def _pairs(views: Sequence[_View]) -> list[_Blame]:
    """Links, each with everything slow that it is part of."""
    blamed: dict[Pair, list[_View]] = {}
    # What is only two ranks is sure; larger groups may only inherit from it.
    for view in sorted(views, key=lambda each: len(each.slow.unit.ranks)):
        ranks = set(view.slow.unit.ranks)
        known = [pair for pair in blamed if set(pair) <= ranks]
        if len(ranks) == 2 and view.pair is not None:
            blamed.setdefault(view.pair, []).append(view)
        elif known:
            blamed[max(known, key=lambda pair: sum(each.slow.lost_ns for each in blamed[pair]))].append(view)
        elif view.pair is not None:
            blamed.setdefault(view.pair, []).append(view)
    taken = {id(view) for each in blamed.values() for view in each}
    for view in views:
        inside = [pair for pair in blamed if set(pair) <= set(view.slow.unit.ranks)]
        if id(view) not in taken and inside:
            blamed[inside[0]].append(view)
    return [
        _Blame(
            cause="slow_link",
            ranks=pair,
            host=None,
            units=tuple(each.slow for each in found),
            trust=max(each.trust for each in found if each.pair == pair),
            evidence=tuple(each.sentence for each in found if each.sentence and each.pair == pair),
        )
        for pair, found in blamed.items()
    ]


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def _during(samples: Samples, each: SlowUnit) -> Samples:
    chosen = (samples.iteration >= each.first_step) & (samples.iteration <= each.last_step)
    return Samples(
        iteration=samples.iteration[chosen],
        label=samples.label[chosen],
        arrival=samples.arrival[chosen],
        exit=samples.exit[chosen],
    )


def _groups(rest: Sequence[SlowUnit], others_blamed: bool) -> list[_Blame]:
    """Groups that nothing smaller explains; the widest inherit from what is inside them."""
    by_ranks: dict[tuple[int, ...], list[SlowUnit]] = {}
    for each in rest:
        by_ranks.setdefault(_identity(each.unit), []).append(each)
    found = []
    for ranks, units in by_ranks.items():
        inside = any(set(other) < set(ranks) for other in by_ranks if other != ranks)
        if inside or (others_blamed and units[0].unit.name == "world"):
            continue
        found.append(_Blame(cause="slow_group", ranks=ranks, host=None, units=tuple(units), trust=0.8))
    return found


def _everywhere(slow: Sequence[SlowUnit]) -> list[_Blame]:
    """Of each kind, what became slow together and crosses no one border: told, but no place is named."""
    kinds: dict[str, list[SlowUnit]] = {}
    for each in slow:
        kinds.setdefault(each.unit.name, []).append(each)
    return [
        _Blame(
            cause="slow_group",
            ranks=tuple(sorted({rank for each in units for rank in each.unit.ranks})),
            host=None,
            units=tuple(units),
            trust=0.48,
            evidence=(f"all comparable {name} transfers became slow together: no place stands out",),
        )
        for name, units in kinds.items()
    ]


def _finding(blame: _Blame, table: StepTable) -> Finding:
    worst = max(blame.units, key=lambda each: each.lost_ns)
    first = min(each.first_step for each in blame.units)
    last = max(each.last_step for each in blame.units)
    sure = max(each.raised.confidence for each in blame.units)
    if all(each.by_past for each in blame.units):
        sure *= 0.92
    unit = worst.unit
    what = (
        f"transfers from rank {unit.ranks[0]} to rank {unit.ranks[1]}"
        if unit.is_edge
        else f"{unit.name} operations"
    )
    compared = "than before" if worst.by_past else "than comparable ones in the same steps"
    evidence = [
        f"{what} take {worst.extra_ns / 1e6:.2f} ms longer from the last arrival on ({worst.ratio:.1f} times "
        f"as long) {compared} ({worst.raised.certainty:.0f} standard errors)",
        *blame.evidence,
        "late arrival is not in it: the time begins when the last side is there",
    ]
    directions = sorted({each.unit.ranks for each in blame.units if each.unit.is_edge})
    return Finding(
        cause=blame.cause,
        lateness="slow_transfer",
        ranks=blame.ranks,
        group=unit.name,
        host=blame.host,
        first_step=first,
        last_step=last,
        lost_fraction=min(worst.lost_ns / max(table.step_ns, 1.0), 1.0),
        confidence=round(sure * blame.trust, 3),
        evidence=tuple(evidence),
        details={
            "extra_ms": round(worst.extra_ns / 1e6, 4),
            "ratio": round(worst.ratio, 3),
            "directions": [list(each) for each in directions],
            "groups": sorted({each.unit.name for each in blame.units}),
            "certainty": round(worst.raised.certainty, 2),
        },
    )
