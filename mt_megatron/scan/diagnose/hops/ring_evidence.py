"""Where a ring is slow, by its members' exits beside those of sound operations: a hop, several, or all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mt_megatron.scan.analysis.robust import Floats

from .exit_evidence import (
    Candidate,
    Deviation,
    Explanation,
    Times,
    View,
    best_place,
    middle,
    regular,
    scatter,
)
from .ring_networks import Network
from .ring_patterns import Hops

USUAL = 0.06
"""By how much links of one kind differ (a part of a hop's time)."""

USUAL_OVER_TIME = 0.02
"""The same of one link at different times."""

MODEL = 0.0075
"""Of the whole operation: what no model of a network gets right of a sound ring."""

MISFIT = 0.03
"""The same of the deviation."""

_LEAST_SLOWNESS = 0.5
"""A slow hop takes so much longer, in units of what the like take, at least."""

_MOST_CANDIDATES = 10
_FOR_PATTERNS = 24


@dataclass(frozen=True, kw_only=True)
class Ring:
    """What is known of a ring before its exits are looked at."""

    number: int
    """Rounds."""

    crossing: Hops
    """Hops that lead from one node to another."""

    borders: Sequence[Hops] = ()
    """Sets of hops across one node's border."""

    clock_error: float = 0.0


def slow_place(
    ring: Ring,
    known: Sequence[Network],
    seen: Times,
    sound: Sequence[Times],
    *,
    same_ring: bool,
    least_gain: float,
) -> Explanation | None:
    """The hops of ``ring`` (by their senders) that explain ``seen`` best beside ``sound`` operations: its own
    at other times (``same_ring``), or those of rings that lie alike; their network is one of ``known``.

    None where there is nothing to explain: less than ``least_gain``.
    """
    seen, sound = regular(seen), [regular(each) for each in sound]
    views: list[View] = []
    for network in known:
        deviation, hop = _deviation(network, ring, seen, sound, same_ring)
        if deviation.size < least_gain:
            continue
        views.append((deviation, _candidates(network, ring, seen, hop, deviation.later)))
    return best_place(views)


def _deviation(
    network: Network, ring: Ring, seen: Times, sound: Sequence[Times], same_ring: bool
) -> tuple[Deviation, float]:
    """What members leave later than expected, and the time of a sound hop."""
    members = seen[0].shape[1]
    nothing = np.zeros(members)
    hops = [network.hop(*each, ring.number) for each in sound]
    hop = float(np.median(hops))
    usual = [
        each[1] - network.exits(each[0], own, nothing, ring.number)
        for each, own in zip(sound, hops, strict=True)
    ]
    middles = np.stack([middle(each) for each in usual])
    rest = seen[1] - network.exits(seen[0], hop, nothing, ring.number)
    later = middle(rest) - np.median(middles, axis=0)
    covariance = scatter(rest) + _between(usual, middles)
    # Links of one kind differ: each by itself, and all of a ring beside all of another.
    unsteady = (USUAL_OVER_TIME if same_ring else USUAL) * hop * network.weights
    pattern = _Pattern(network, ring, seen, hop)
    for each in (pattern(np.diag(unsteady)), pattern(np.diag(-unsteady))):
        covariance += 0.5 * (each.T @ each)
    together = pattern(unsteady)
    covariance += np.outer(together, together)
    whole = float(np.median(seen[1].max(axis=1)))
    floor = max(MODEL * whole, 0.5 * ring.clock_error) ** 2 + (MISFIT * float(np.abs(later).max())) ** 2
    return Deviation(later=later, covariance=covariance + floor * np.eye(members)), hop


def _candidates(network: Network, ring: Ring, seen: Times, hop: float, later: Floats) -> list[Candidate]:
    own = hop * network.weights
    most = 1.5 * max(float(np.abs(later).max()), hop)
    found: list[Candidate] = []
    # That a message only travels longer is less usual than that it takes its link longer.
    for kind in network.overlapping():
        unlikely = int(kind is not network)
        pattern = _Pattern(kind, ring, seen, hop)
        for place in _places(ring, later):
            receivers = [(sender + 1) % len(own) for sender in place]
            slowest = float(own[receivers].min())
            where = np.zeros(len(own))
            where[receivers] = 1.0
            shapes = [where]
            if len(place) > 1 and unlikely == 0:
                # Less bandwidth lengthens each by a part of its own time, latency all by the same.
                shapes.append(where * own / slowest)
            found += [
                Candidate(
                    place=place,
                    least=_LEAST_SLOWNESS * slowest,
                    most=most + slowest,
                    pattern=partial(pattern.scaled, shape),
                    # A border is slow for more than this ring: a single hop that does as well is enough.
                    unlikely=unlikely + (1 < len(place) < len(own)),
                )
                for shape in shapes
            ]
    return found


class _Pattern:
    """What slower hops make the members leave later."""

    def __init__(self, network: Network, ring: Ring, seen: Times, hop: float) -> None:
        self._network, self._hop, self._number = network, hop, ring.number
        few = np.linspace(0, len(seen[0]) - 1, min(len(seen[0]), _FOR_PATTERNS)).astype(np.int64)
        self._arrival = seen[0][few]
        nothing = np.zeros(self._arrival.shape[1])
        self._plain = network.exits(self._arrival, hop, nothing, ring.number)

    def scaled(self, shape: Floats, sizes: Floats) -> Floats:
        """[sizes, members] of ``shape`` [members] in several sizes."""
        return self(sizes[:, None] * shape)

    def __call__(self, extra: Floats) -> Floats:
        """[..., members] of ``extra`` [..., members], ns of the hop to each member."""
        made = self._network.exits(self._arrival, self._hop, extra[..., None, :], self._number)
        found: Floats = np.mean(made - self._plain, axis=-2)
        return found


def _between(usual: Sequence[Floats], middles: Floats) -> Floats:
    """Covariance of what is expected: of one sound ring its samples', of several what they differ by."""
    if len(usual) < 3:
        return sum((scatter(each) for each in usual), np.zeros((middles.shape[1],) * 2)) / len(usual)
    apart = middles - np.median(middles, axis=0)
    limit = 3.0 * np.maximum(1.4826 * np.median(np.abs(apart), axis=0), 1.0)
    apart = np.clip(apart, -limit, limit)
    found: Floats = 1.57 * (apart.T @ apart) / len(usual) ** 2
    return found


def _places(ring: Ring, later: Floats) -> list[Hops]:
    members, steps = len(later), later - np.roll(later, 1)
    if members <= _MOST_CANDIDATES:
        single = list(range(members))
    else:
        # The hop to, or from, whoever leaves much later than the one before.
        order = np.argsort(-np.maximum(steps, np.roll(steps, -1)))[:_MOST_CANDIDATES]
        single = [int((receiver - 1) % members) for receiver in order]
    found: list[Hops] = [(hop,) for hop in single]
    more = [tuple(range(members)), *ring.borders]
    found += [each for each in dict.fromkeys(more) if len(each) > 1]
    return found
