"""Slow transfers: the smallest set of links, node borders and groups that explains all slow units."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mt_megatron.scan.analysis.matched_ops import Label
from mt_megatron.scan.analysis.step_table import StepTable
from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.analysis.units import LEAST_LOSS, SlowUnit, Unit
from mt_megatron.scan.diagnose.hops.slow_rings import node_of
from mt_megatron.scan.diagnose.hops.where_slow import WhereSlow
from mt_megatron.scan.findings.finding import Cause, Finding

from .link_views import NODE_SHARE, Pair, View, borders_of, cost_of, crosses

MOST_FITS = 24


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
    where = WhereSlow(judged, labels, table.places)
    unsound = {id(each.unit) for each in slow}
    views = []
    for each in slow:
        view = View(each, table.places)
        if view.pair is None and id(each) in fitted:
            view.fit(labels, where, unsound, borders_of(each.unit, judged, unsound, table))
        views.append(view)
    pairs_known = [view.pair for view in views if view.pair is not None]
    for view in views:
        view.inherits(pairs_known)
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
    rest = [each.slow for each in views if id(each.slow) not in explained and each.slow.pair is None]
    unclear = {id(each.slow) for each in views if each.unclear}
    blames += _groups(rest, judged, unclear, bool(blames))
    return [_finding(blame, table) for blame in blames]


def _node(views: Sequence[View], judged: Sequence[Unit], table: StepTable) -> _Blame | None:
    """The node whose border most slow units cross, if most that cross it are slow."""
    places = table.places
    nodes = sorted({node_of(places, rank) for unit in judged for rank in unit.ranks})
    if len(nodes) < 2 or not views:
        return None
    ratio = sorted(each.slow.ratio for each in views)[len(views) // 2]
    found: list[tuple[tuple[int, float], str, list[View]]] = []
    for node in nodes:
        here = [each for each in views if node in each.nodes]
        different = {_identity(each.slow.unit) for each in here}
        told = any(each.border == node for each in here)
        # What is too rare to show its slowness speaks neither for nor against the node.
        crossing = different | {
            _identity(unit)
            for unit in judged
            if crosses(unit, node, places)
            and cost_of(unit, table) * (1.0 - 1.0 / ratio) > 2 * LEAST_LOSS * table.step_ns
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


def _host(places: Mapping[int, Place], node: str) -> str:
    return node.partition("/")[2] or f"node {node.partition('/')[0]}"


def _identity(unit: Unit) -> tuple[int, ...]:
    """Both directions of an edge, and groups of the same ranks, are one thing."""
    return tuple(sorted(unit.ranks))


def _one_pair(views: Sequence[View]) -> bool:
    """Whether one pair of ranks is part of all of them, and the only one that is."""
    common = set(views[0].slow.unit.ranks)
    for each in views[1:]:
        common &= set(each.slow.unit.ranks)
    return len(common) >= 2 and any(each.pair is not None for each in views)


def _pairs(views: Sequence[View]) -> list[_Blame]:
    """Links, each with everything slow that it is part of."""
    blamed: dict[Pair, list[View]] = {}
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


def _groups(
    rest: Sequence[SlowUnit], judged: Sequence[Unit], unclear: Collection[int], others_blamed: bool
) -> list[_Blame]:
    """Groups that nothing smaller explains. What is inside another is its cause, unless all that is inside is
    slow: then the larger group is the one thing that explains them. ``unclear``: ``id`` of those in which a
    place may be slow that their exits do not tell: of these no cause is sure."""
    by_ranks: dict[tuple[int, ...], list[SlowUnit]] = {}
    for each in rest:
        by_ranks.setdefault(_identity(each.unit), []).append(each)
    known = {_identity(unit): unit.name for unit in judged}
    whole = [ranks for ranks in by_ranks if _made_of_slow(ranks, set(by_ranks), known)]
    found = []
    for ranks, units in by_ranks.items():
        inside = [other for other in by_ranks if set(other) < set(ranks)]
        if (inside and ranks not in whole) or any(set(ranks) < set(other) for other in whole):
            continue
        if others_blamed and units[0].unit.name == "world":
            continue
        sure = ranks in whole or not all(id(each) in unclear for each in units)
        trust = 0.8 if sure else 0.48
        more = [each for other in inside for each in by_ranks[other]]
        found.append(_Blame(cause="slow_group", ranks=ranks, host=None, units=(*units, *more), trust=trust))
    return found


def _made_of_slow(
    ranks: tuple[int, ...], slow: Collection[tuple[int, ...]], known: Mapping[tuple[int, ...], str]
) -> bool:
    """Whether several groups of one kind lie inside, make up all of it, and all are slow."""
    kinds: dict[str, list[tuple[int, ...]]] = {}
    for other, name in known.items():
        if set(other) < set(ranks):
            kinds.setdefault(name, []).append(other)
    return any(
        len(parts) > 1 and all(part in slow for part in parts) and set().union(*map(set, parts)) == set(ranks)
        for parts in kinds.values()
    )


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
    same = [each for each in blame.units if _identity(each.unit) == blame.ranks]
    worst = max(same or blame.units, key=lambda each: each.lost_ns)
    first = min(each.first_step for each in blame.units)
    last = max(each.last_step for each in blame.units)
    sure = max(each.confidence for each in blame.units)
    if all(each.by_past for each in blame.units):
        sure *= 0.92
    unit = worst.unit
    what = (
        f"transfers from rank {unit.ranks[0]} to rank {unit.ranks[1]}"
        if unit.is_edge
        else f"{unit.name} operations"
    )
    compared = "than before" if worst.by_past else "than comparable ones in the same steps"
    tested = "" if worst.certainty is None else f" ({worst.certainty:.1f} times the noise)"
    evidence = [
        f"{what} take {worst.extra_ns / 1e6:.2f} ms longer from the last arrival on ({worst.ratio:.1f} times "
        f"as long) {compared}{tested}",
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
            **({} if worst.certainty is None else {"certainty": round(worst.certainty, 2)}),
        },
    )
