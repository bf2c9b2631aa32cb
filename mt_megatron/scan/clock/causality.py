"""No effect before its cause: the smallest corrections of fitted clocks after which nothing arrives early.

A pair of events binds two clocks: ``end`` on one may not be before ``begin`` on the other. Corrections that
satisfy all pairs of a stretch of time solve a system of difference constraints (shortest paths, Bellman and
Ford). Its largest solution below zero and its smallest above are both solutions, and so is their mean,
which moves everybody as little as either side allows. Between the stretches' borders corrections are
interpolated: what both borders satisfy, every value in between satisfies too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .bindings import Collectives, Transfers
from .offset_lines import Floats, OffsetLine, Times

_STRETCH = 10_000_000_000
_MOST_STRETCHES = 4096
_MARGIN = 50.0
_ROUNDS = 8


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What ``repair`` did."""

    lines: Mapping[int, OffsetLine]
    """Corrected lines by domain."""

    corrected: Mapping[int, float]
    """Domain -> its largest correction in ns."""

    pairs: int
    """Pairs of events that were looked at."""

    early: int
    """Of those, effects before their cause by the lines as they were."""

    left: int
    """And after the correction."""

    mismatched: int
    """Pairs too far apart to be a clock's error; they were not obeyed."""


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """``end`` on the clock of domain ``effect`` must not be before ``begin`` on that of ``cause``; on the
    reference clock by the lines as they were."""

    effect: Times
    cause: Times
    end: Times
    begin: Times

    def of(self, chosen: np.ndarray) -> _Pairs:
        return _Pairs(
            effect=self.effect[chosen],
            cause=self.cause[chosen],
            end=self.end[chosen],
            begin=self.begin[chosen],
        )


def repair(
    lines: Mapping[int, OffsetLine],
    domains: Mapping[int, int],
    collectives: Sequence[Collectives],
    transfers: Sequence[Transfers],
    *,
    home: int,
    trusted: Mapping[int, float],
) -> Repair:
    """Correct ``lines`` (domain -> line to the reference clock) until no pair is early.

    ``home`` is the domain that stays as it is. ``trusted`` is the most in ns by which each domain's line
    can be wrong; pairs that ask for more than twice the two domains' together are counted as mismatched.
    """
    order = sorted(lines)
    number = {domain: index for index, domain in enumerate(order)}
    limits = np.array([trusted.get(domain, 0.0) for domain in order])
    now, total = dict(lines), np.zeros(len(order))
    counts: list[tuple[int, int, int]] = []
    while True:
        pairs, mismatched = _candidates(collectives, transfers, now, domains, number, limits)
        early = int((pairs.end < pairs.begin).sum())
        counts.append((len(pairs.end) + mismatched, early, mismatched))
        if early == 0 or len(counts) > _ROUNDS:
            break
        # Moving the clock of the worst pair of a collective can make another one of it the worst.
        knots = _knots(pairs)
        corrections = _solve(pairs, knots, len(order))
        corrections -= corrections[number[home]]
        if not corrections.any():
            break
        now = {domain: now[domain].plus(knots, corrections[number[domain]]) for domain in order}
        total += np.abs(corrections).max(axis=1)
    return Repair(
        lines=now,
        corrected={domain: float(total[number[domain]]) for domain in order},
        pairs=counts[0][0],
        early=counts[0][1],
        left=counts[-1][1],
        mismatched=counts[0][2],
    )


def _candidates(
    collectives: Sequence[Collectives],
    transfers: Sequence[Transfers],
    lines: Mapping[int, OffsetLine],
    domains: Mapping[int, int],
    number: Mapping[int, int],
    limits: Floats,
) -> tuple[_Pairs, int]:
    """Per collective its first end against every begin and its last begin against every end; every transfer.
    Without those that no error of the clocks explains, whose number comes second."""
    effects, causes, ends, begins = [], [], [], []

    def convert(rank: int, times: Times) -> Times:
        return lines[domains[rank]](times)

    def add(effect: np.ndarray, cause: np.ndarray, end: Times, begin: Times) -> None:
        different = effect != cause
        effects.append(effect[different])
        causes.append(cause[different])
        ends.append(end[different])
        begins.append(begin[different])

    for each in transfers:
        count = len(each.sent)
        effect, cause = number[domains[each.target]], number[domains[each.source]]
        add(
            np.full(count, effect),
            np.full(count, cause),
            convert(each.target, each.received),
            convert(each.source, each.sent),
        )
    for each_collective in collectives:
        members = np.array([number[domains[rank]] for rank in each_collective.ranks])
        end = np.stack(
            [
                convert(rank, row)
                for rank, row in zip(each_collective.ranks, each_collective.ends, strict=True)
            ]
        )
        begin = np.stack(
            [
                convert(rank, row)
                for rank, row in zip(each_collective.ranks, each_collective.begins, strict=True)
            ]
        )
        columns = np.arange(end.shape[1])
        first, last = end.argmin(axis=0), begin.argmax(axis=0)
        for index, member in enumerate(members):
            here = np.full(len(columns), member)
            add(members[first], here, end[first, columns], begin[index])
            add(here, members[last], end[index], begin[last, columns])
    empty = np.zeros(0, dtype=np.int64)
    pairs = _Pairs(
        effect=np.concatenate([empty, *effects]),
        cause=np.concatenate([empty, *causes]),
        end=np.concatenate([empty, *ends]),
        begin=np.concatenate([empty, *begins]),
    )
    right = pairs.begin - pairs.end <= 2 * (limits[pairs.effect] + limits[pairs.cause])
    return pairs.of(right), int((~right).sum())


def _knots(pairs: _Pairs) -> Times:
    start = int(min(pairs.end.min(), pairs.begin.min()))
    length = int(max(pairs.end.max(), pairs.begin.max())) - start + 1
    count = min(max(length // _STRETCH, 1), _MOST_STRETCHES)
    return start + (np.arange(count + 1) * (length / count)).astype(np.int64)


def _solve(pairs: _Pairs, knots: Times, domains: int) -> Floats:
    """Corrections (domains, knots) in ns."""
    slack = (pairs.end - pairs.begin).astype(np.float64) - _MARGIN
    # A pair near a border belongs to both sides.
    one = np.clip(np.searchsorted(knots, pairs.end, side="right") - 1, 0, len(knots) - 2)
    two = np.clip(np.searchsorted(knots, pairs.begin, side="right") - 1, 0, len(knots) - 2)
    found = np.zeros((domains, len(knots)))
    stretches = np.concatenate([one, two])
    both = np.tile(np.arange(len(slack)), 2)
    by_stretch = np.argsort(stretches, kind="stable")
    borders = np.searchsorted(stretches[by_stretch], np.arange(len(knots)))
    previous = np.full((domains, domains), np.inf)
    for knot in range(len(knots)):
        bound = np.full((domains, domains), np.inf)
        if knot < len(knots) - 1:
            members = both[by_stretch[borders[knot] : borders[knot + 1]]]
            np.minimum.at(bound, (pairs.effect[members], pairs.cause[members]), slack[members])
        found[:, knot] = _least(np.minimum(bound, previous))
        previous = bound
    return found


def _least(bound: Floats) -> Floats:
    """Corrections p with ``p[cause] - p[effect] <= bound[effect, cause]``, as near to 0 as both extreme
    solutions' mean; zeros where there is none (the pairs contradict each other)."""
    below, above = np.zeros(len(bound)), np.zeros(len(bound))
    for _ in range(len(bound) + 1):
        lower = np.minimum(below, (below[:, None] + bound).min(axis=0))
        upper = np.maximum(above, (above[None, :] - bound).max(axis=1))
        if (lower == below).all() and (upper == above).all():
            return (below + above) / 2
        below, above = lower, upper
    return np.zeros(len(bound))
