"""How a sound ring's network behaves, learned from the members' own times: what is expected of each exit.

Which of the ways of ``ring_patterns`` a network has, how much quicker hops within a node are, and how long a
hop takes are fitted to operations that nothing is known against (the same ring's before a change, or those
of rings that lie alike). What is then left of an exit is a slow hop's, or the unsteadiness of links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mt_megatron.scan.analysis.matched_ops import Samples
from mt_megatron.scan.analysis.robust import Floats

from .exit_evidence import Times
from .ring_patterns import Hops, Way, ring_exits

_INSIDE = (0.06, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.7, 1.0)
"""How long a hop within a node may take, in units of one between nodes, where a ring has both."""

_MOST = 24
_MOST_TIMES = 400
AS_GOOD = 1.01
"""A way whose errors are at most so many times the best one's may be the network's as well."""

_SOUND: tuple[Way, ...] = ("rendezvous", "posted", "sending", "eager")
"""Others differ from these only where a hop is slow."""

_OVERLAPPING: dict[Way, tuple[Way, ...]] = {"posted": ("late",), "sending": ("busy", "late")}
"""What a way may become where a message only travels longer, and does not keep the sender."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """How a ring's hops behave."""

    way: Way
    weights: Floats
    """Of the hop to each member, in units of the slowest kind; [members]."""

    together: bool
    """Whether nobody begins before the last has come."""

    def overlapping(self) -> tuple[Network, ...]:
        """This network, and those it may be where messages that travel longer keep nobody."""
        return (self, *(replace(self, way=other) for other in _OVERLAPPING.get(self.way, ())))

    def exits(self, arrival: Floats, hop: Floats | float, extra: Floats, number: int) -> Floats:
        """``hop``: ns of the slowest kind of hop, to be broadcast; ``extra`` [..., members] as in
        ``ring_exits``."""
        start = np.zeros_like(arrival) if self.together else arrival
        return ring_exits(start, hop * self.weights, extra, number, self.way)

    def hop(self, arrival: Floats, exit_: Floats, number: int) -> float:
        """The hop's time with which the last exits are as late as those seen; both [samples, members]."""
        whole = float(np.median(exit_.max(axis=1)))
        nothing = np.zeros(arrival.shape[1])
        hop = whole / number
        for _ in range(3):
            made = float(np.median(self.exits(arrival, hop, nothing, number).max(axis=1)))
            hop *= float(np.clip(whole / max(made, 1.0), 0.2, 5.0))
        return hop


def even(samples: Samples, most: int | None = None) -> Times:
    """Arrivals and exits [samples, members] of some complete samples, spread evenly."""
    members = samples.exit.shape[1]
    at = np.flatnonzero(np.isfinite(samples.exit).all(axis=1))
    most = most or max(8, min(_MOST, _MOST_TIMES // members))
    if len(at) > most:
        at = at[np.linspace(0, len(at) - 1, most).astype(np.int64)]
    return samples.arrival[at].astype(np.float64), samples.exit[at].astype(np.float64)


def networks(sound: Sequence[Times], crossing: Hops, number: int) -> list[Network]:
    """What fits the arrivals and exits of the rings ``sound``, best first."""
    members = sound[0][0].shape[1]
    weights = [np.ones(members)]
    if 0 < len(crossing) < members:
        between = np.isin((np.arange(members) - 1) % members, list(crossing))
        weights = [np.where(between, 1.0, inside) for inside in _INSIDE]
    found: list[tuple[float, Network]] = []
    for way in _SOUND:
        for weight in weights:
            for together in (False, True):
                network = Network(way=way, weights=weight, together=together)
                found.append((_error(network, sound, number), network))
    found.sort(key=lambda each: each[0])
    kept: list[Network] = []
    for error, network in found:
        # One of each way: how quick the quick hops are is what fits it best.
        if error <= AS_GOOD * found[0][0] and all(each.way != network.way for each in kept):
            kept.append(network)
    return kept


def _error(network: Network, sound: Sequence[Times], number: int) -> float:
    """The middle ring's: some may have a slow hop."""
    errors = []
    for arrival, seen in sound:
        hop = network.hop(arrival, seen, number)
        rest = seen - network.exits(arrival, hop, np.zeros(arrival.shape[1]), number)
        errors.append(float(np.median(np.abs(rest))) / max(float(np.median(seen.max(axis=1))), 1.0))
    return float(np.median(errors))
