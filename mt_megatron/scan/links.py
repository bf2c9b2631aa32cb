"""Slow transfers: the smallest set of links, node borders and groups that explains all slow units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .exchanges import Label, Samples
from .findings import Cause, Finding
from .ring_patterns import Hops, fit_pairs, fit_ring
from .slow_units import SlowUnit, Unit
from .step_table import StepTable
from .trace import Place

NODE_SHARE = 0.7
"""Of the units that cross a node's border, so many must be slow to blame its border."""

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
    rest = list(slow)
    blames: list[_Blame] = []
    while (node := _node(rest, judged, table.places)) is not None:
        blames.append(node)
        rest = [each for each in rest if each not in node.units]
    pairs = _pairs(rest, labels, table.places)
    blames += pairs
    explained = {id(unit) for blame in pairs for unit in blame.units}
    rest = [each for each in rest if id(each) not in explained]
    blames += _groups(rest, bool(blames))
    return [_finding(blame, table) for blame in blames]


def _node(rest: Sequence[SlowUnit], judged: Sequence[Unit], places: Mapping[int, Place]) -> _Blame | None:
    """The node whose border most slow units cross, if most that cross it are slow."""
    nodes = sorted({_node_of(places, rank) for unit in judged for rank in unit.ranks})
    if len(nodes) < 2:
        return None
    best: tuple[float, int, str, list[SlowUnit]] | None = None
    tied: list[str] = []
    for node in nodes:
        crossing = {_identity(unit) for unit in judged if _crosses(unit, node, places)}
        units = [each for each in rest if _crosses(each.unit, node, places)]
        different = {_identity(each.unit) for each in units}
        if len(different) < 2 or len(different) < NODE_SHARE * len(crossing) or _one_pair(units):
            continue
        key = (len(different) / len(crossing), len(different))
        if best is None or key > best[:2]:
            best, tied = (*key, node, units), [node]
        elif key == best[:2]:
            tied.append(node)
    if best is None:
        return None
    ranks = tuple(sorted(rank for rank in places if _node_of(places, rank) in tied))
    said = f"{len({_identity(each.unit) for each in best[3]})} groups and edges that cross it are slow"
    if len(tied) > 1:
        return _Blame(
            cause="slow_node_link",
            ranks=ranks,
            host=" or ".join(_host(places, node) for node in tied),
            units=tuple(best[3]),
            trust=0.75,
            evidence=(
                said,
                "all of them join the same nodes: which one is at fault cannot be told from here",
            ),
        )
    return _Blame(
        cause="slow_node_link",
        ranks=ranks,
        host=_host(places, best[2]) or None,
        units=tuple(best[3]),
        trust=1.0,
        evidence=(said,),
    )


def _node_of(places: Mapping[int, Place], rank: int) -> str:
    place = places.get(rank)
    return f"{place.node}/{place.host}" if place is not None else "?"


def _host(places: Mapping[int, Place], node: str) -> str:
    return node.partition("/")[2] or f"node {node.partition('/')[0]}"


def _crosses(unit: Unit, node: str, places: Mapping[int, Place]) -> bool:
    inside = [_node_of(places, rank) == node for rank in unit.ranks]
    return any(inside) and not all(inside)


def _identity(unit: Unit) -> tuple[int, ...]:
    """Both directions of an edge, and groups of the same ranks, are one thing."""
    return tuple(sorted(unit.ranks))


def _one_pair(units: Sequence[SlowUnit]) -> bool:
    """Whether one pair of ranks is part of all of them."""
    common = set(units[0].unit.ranks)
    for each in units[1:]:
        common &= set(each.unit.ranks)
    small = any(len(each.unit.ranks) == 2 for each in units)
    return len(common) >= 2 and small


def _pairs(rest: Sequence[SlowUnit], labels: Sequence[Label], places: Mapping[int, Place]) -> list[_Blame]:
    blamed: dict[Pair, list[SlowUnit]] = {}
    trust: dict[Pair, float] = {}
    said: dict[Pair, list[str]] = {}
    larger = [each for each in rest if len(each.unit.ranks) > 2]
    for each in rest:
        if len(each.unit.ranks) == 2:
            blamed.setdefault(_pair(*each.unit.ranks), []).append(each)
            trust[_pair(*each.unit.ranks)] = 1.0
    open_ones: list[SlowUnit] = []
    for each in larger:
        known = [pair for pair in blamed if set(pair) <= set(each.unit.ranks)]
        if known:
            blamed[max(known, key=lambda pair: sum(unit.lost_ns for unit in blamed[pair]))].append(each)
            continue
        fitted = _fitted(each, labels, places)
        if fitted is None:
            open_ones.append(each)
            continue
        pair, sure, sentence = fitted
        blamed.setdefault(pair, []).append(each)
        trust[pair] = max(trust.get(pair, 0.0), sure)
        said.setdefault(pair, []).append(sentence)
    for each in open_ones:
        inside = [pair for pair in blamed if set(pair) <= set(each.unit.ranks)]
        if inside:
            blamed[inside[0]].append(each)
    return [
        _Blame(
            cause="slow_link",
            ranks=pair,
            host=None,
            units=tuple(units),
            trust=trust[pair],
            evidence=tuple(said.get(pair, ())),
        )
        for pair, units in blamed.items()
    ]


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def _fitted(
    each: SlowUnit, labels: Sequence[Label], places: Mapping[int, Place]
) -> tuple[Pair, float, str] | None:
    """The pair that the pattern of exits names, how far to trust it, and why."""
    unit = each.unit
    if unit.samples is None or unit.clock_error > 0.3 * each.extra_ns:
        return None
    samples = _during(unit.samples, each)
    if not len(samples.iteration):
        return None
    ranks = unit.ranks
    op = labels[int(samples.label[0])][0]
    if "all_to_all" in op:
        found = fit_pairs(samples, each.healthy_ns)
        if found is None:
            return None
        sentence = f"only these two leave the {op} of {unit.name} late"
        return _pair(ranks[found[0]], ranks[found[1]]), 0.9, sentence
    fit = fit_ring(samples, labels, each.healthy_ns, _borders(ranks, places))
    if fit is None or not fit.accepted or len(fit.hops) != 1:
        return None
    sender = fit.hops[0]
    receiver = (sender + 1) % len(ranks)
    sentence = (
        f"the times at which the members leave the {op} of {unit.name} fit a slow hop from rank "
        f"{ranks[sender]} to rank {ranks[receiver]} ({100 * fit.explained:.0f} % of the pattern; the next "
        f"best hop's error is {1.0 / max(fit.against_second, 1e-3):.0f} times as large)"
    )
    return _pair(ranks[sender], ranks[receiver]), 0.97, sentence


def _during(samples: Samples, each: SlowUnit) -> Samples:
    chosen = (samples.iteration >= each.first_step) & (samples.iteration <= each.last_step)
    return Samples(
        iteration=samples.iteration[chosen],
        label=samples.label[chosen],
        arrival=samples.arrival[chosen],
        exit=samples.exit[chosen],
    )


def _borders(ranks: Sequence[int], places: Mapping[int, Place]) -> list[Hops]:
    """For each node the hops of the ring that cross its border, where these are several."""
    nodes = [_node_of(places, rank) for rank in ranks]
    found = []
    for node in sorted(set(nodes)):
        hops = tuple(
            at for at in range(len(ranks)) if (nodes[at] == node) != (nodes[(at + 1) % len(ranks)] == node)
        )
        if len(hops) > 1 and hops not in found:
            found.append(hops)
    return found


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
