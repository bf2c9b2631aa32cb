"""Where in a group transfers are slow: by its members' exits beside its own at other times and its like's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mt_megatron.scan.analysis.matched_ops import Label, Samples
from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.analysis.units import Unit

from .exit_evidence import LEAST_GAIN, Explanation, Times
from .pair_evidence import slow_pair
from .ring_evidence import Ring, slow_place
from .ring_networks import Network, even, networks
from .ring_patterns import Hops, rounds

FEWEST = 8
"""Samples that say what is usual."""

_MOST_SEEN, _MOST_SOUND, _MOST_LIKE = 96, 60, 8
_MOST_CALIBRATED, _CALIBRATED, _SEVERAL = 12, 4, 3
MOST_MEMBERS = 32
LEAST_OCTAVES = 30
"""Half octaves of bytes, 32 KiB: smaller operations take other ways than rings."""


@dataclass(frozen=True, kw_only=True)
class Located:
    """A slow place within a group."""

    pair: tuple[int, int] | None
    """Global ranks, sender first where that is known; None where it is more than one pair."""

    hops: Hops
    """Of a ring, by the senders' positions; of other operations the members' positions."""

    op: str
    slowness_ns: float
    explanation: Explanation
    by_past: bool


class WhereSlow:
    """Looks for the slow place in groups of one run."""

    def __init__(self, units: Sequence[Unit], labels: Sequence[Label], places: Mapping[int, Place]) -> None:
        self._labels, self._places = labels, places
        self._sharded = any("param_sync" in op for op, _ in labels)
        self._like: dict[tuple[object, ...], list[Unit]] = {}
        self._known: dict[tuple[object, ...], list[Network]] = {}
        for unit in units:
            if unit.samples is not None and len(unit.samples.label):
                self._like.setdefault(self._kind(unit), []).append(unit)

    def find(
        self,
        unit: Unit,
        first: int,
        last: int,
        *,
        unsound: Collection[int],
        borders: Sequence[Hops] = (),
        least_gain: float = LEAST_GAIN,
        only_like: bool = False,
    ) -> Located | None:
        """The place that clearly explains the exits of ``unit`` in the steps ``first`` to ``last``.

        ``unsound``: ``id`` of units that say nothing of what is usual; ``borders``: sets of hops that may be
        slow together; ``only_like``: not beside the group's own other steps. All ways of looking that are
        clear have to say the same.
        """
        if unit.samples is None or not len(unit.samples.label) or len(unit.ranks) > MOST_MEMBERS:
            return None
        found: list[Located] = []
        for samples in _present(unit):
            if 0 <= self._labels[int(samples.label[0])][1] < LEAST_OCTAVES:
                continue
            inside = (samples.iteration >= first) & (samples.iteration <= last)
            seen = even(samples.take(inside), _MOST_SEEN)
            if len(seen[0]) < FEWEST:
                continue
            past = even(samples.take(~inside), _MOST_SEEN)
            if len(past[0]) >= FEWEST and not only_like:
                found += self._clear(unit, samples, seen, [past], borders, least_gain, by_past=True)
            like = self._sound(unit, samples, first, last, unsound)
            if like:
                found += self._clear(unit, samples, seen, like, borders, least_gain, by_past=False)
        if not found or len({frozenset(each.pair or each.hops) for each in found}) > 1:
            return None
        return max(found, key=lambda each: each.explanation.gain)

    def comparable(self, unit: Unit, first: int, last: int, unsound: Collection[int]) -> bool:
        """Whether something says what is usual of the exits of ``unit`` in these steps."""
        if unit.samples is None or not len(unit.samples.label) or len(unit.ranks) > MOST_MEMBERS:
            return False
        inside = (unit.samples.iteration >= first) & (unit.samples.iteration <= last)
        if min(int(inside.sum()), len(even(unit.samples.take(inside), _MOST_SEEN)[0])) < FEWEST:
            return False
        past = len(even(unit.samples.take(~inside), _MOST_SEEN)[0]) >= FEWEST
        return past or bool(self._sound(unit, unit.samples, first, last, unsound))

    def _clear(
        self,
        unit: Unit,
        samples: Samples,
        seen: Times,
        sound: Sequence[Times],
        borders: Sequence[Hops],
        least_gain: float,
        *,
        by_past: bool,
    ) -> list[Located]:
        op = self._labels[int(samples.label[0])][0]
        members = len(unit.ranks)
        explanation: Explanation | None
        pair: tuple[int, int] | None = None
        if "all_to_all" in op:
            explanation = slow_pair(
                seen, sound, same_group=by_past, clock_error=unit.clock_error, least_gain=least_gain
            )
            if explanation is not None and len(explanation.place) == 2:
                pair = unit.ranks[explanation.place[0]], unit.ranks[explanation.place[1]]
            if explanation is not None and len(explanation.place) == 1:
                return []  # one member alone is no link
        else:
            ring = Ring(
                number=rounds(op, members, sharded=self._sharded),
                crossing=self._crossing(unit),
                borders=tuple(borders),
                clock_error=unit.clock_error,
            )
            explanation = slow_place(
                ring,
                self._networks(unit, samples, ring, sound),
                seen,
                sound,
                same_ring=by_past,
                least_gain=least_gain,
            )
            if explanation is not None and len(explanation.place) == 1:
                sender = explanation.place[0]
                pair = unit.ranks[sender], unit.ranks[(sender + 1) % members]
        if explanation is None or not explanation.clear(least_gain):
            return []
        return [
            Located(
                pair=pair,
                hops=explanation.place,
                op=op,
                slowness_ns=explanation.slowness,
                explanation=explanation,
                by_past=by_past,
            )
        ]

    def _networks(self, unit: Unit, samples: Samples, ring: Ring, sound: Sequence[Times]) -> list[Network]:
        """How rings that lie as this one behave: the most of them, whatever is wrong with some. Where there
        are too few to tell, as the ``sound`` operations do."""
        label = int(samples.label[0])
        key = (*self._kind(unit), label)
        members = self._like[self._kind(unit)]
        if len(members) < _SEVERAL:
            return networks(sound[:_CALIBRATED], ring.crossing, ring.number)
        if key not in self._known:
            chosen = [each for one in members for each in _present(one)]
            times = [even(each, _MOST_CALIBRATED) for each in chosen if int(each.label[0]) == label]
            times = [each for each in times if len(each[0])][:_CALIBRATED]
            self._known[key] = networks(times or sound[:_CALIBRATED], ring.crossing, ring.number)
        return self._known[key]

    def _sound(
        self, unit: Unit, samples: Samples, first: int, last: int, unsound: Collection[int]
    ) -> list[Times]:
        found: list[Times] = []
        wanted = int(samples.label[0])
        for other in self._like[self._kind(unit)]:
            if other is unit or id(other) in unsound:
                continue
            for each in _present(other):
                if int(each.label[0]) != wanted:
                    continue
                inside = (each.iteration >= first) & (each.iteration <= last)
                times = even(each.take(inside), _MOST_SOUND)
                if len(times[0]) >= FEWEST:
                    found.append(times)
            if len(found) >= _MOST_LIKE:
                break
        return found

    def _kind(self, unit: Unit) -> tuple[object, ...]:
        return unit.name, len(unit.ranks), self._crossing(unit)

    def _crossing(self, unit: Unit) -> Hops:
        nodes = [self._node(rank) for rank in unit.ranks]
        return tuple(at for at in range(len(nodes)) if nodes[at] != nodes[(at + 1) % len(nodes)])

    def _node(self, rank: int) -> object:
        place = self._places.get(rank)
        return None if place is None else (place.node, place.host)


def _present(unit: Unit) -> list[Samples]:
    """Its operations by name, where there are any: steps may have been left out."""
    kept = () if unit.samples is None else (unit.samples, *unit.others)
    return [each for each in kept if len(each.label)]
