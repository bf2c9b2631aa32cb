"""Knowledge of the policy about a run: measured times, links and memory, smoothed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ..actions import Placement
from ..simulate.costs import Costs, Edge, Link

WEIGHT_SHARE = 0.4
"""Part of a whole backward that computes weight gradients, until a split backward has been measured: half
of a linear layer's backward, nothing of attention's and of a norm's."""

SLOW_EDGE = 2.0
"""An edge is called slow if a message takes at least so many times as long as over the median edge."""


@dataclass(frozen=True, kw_only=True)
class EdgeTime:
    """Time of one message between two ranks in one step."""

    delay: float
    """Seconds from the send to the arrival of a message that waits for no other one."""

    wire: float = 0.0
    """Seconds of them in which the next message has to wait; 0 where messages did not queue."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Times of one training step. ``backward`` belongs to steps with a whole backward, ``input`` and
    ``weight`` to steps with a split one; a schedule may have both. NaN: not measured."""

    step: int
    seconds: float
    """From the first action of any rank to the last one; reductions and waiting included."""

    forward: Sequence[float]
    """Seconds of an F, [stages]: mean of the micro-batches."""

    backward: Sequence[float] | None = None
    input: Sequence[float] | None = None
    weight: Sequence[float] | None = None
    edges: Mapping[Edge, EdgeTime] = field(default_factory=dict)
    """By sending and receiving rank; an edge that carried nothing is missing."""

    memory: Sequence[float] | None = None
    """Bytes that each rank has held at most so far, [ranks]; None where the device does not say."""

    activation: Sequence[float] | None = None
    """Bytes that an F leaves behind for its B, [stages]; None where the device does not say."""

    capacity: Sequence[float] | None = None
    """Bytes that each rank's device has, [ranks]."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Inputs of one decision."""

    placement: Placement
    microbatches: int
    costs: Costs
    """Smoothed."""

    cap: tuple[float, ...] | None = None
    """Memory that each rank may hold, [ranks], in the unit of ``costs.activation`` and ``costs.static``.
    Never passed. None: no limit."""

    headroom: float | None = None
    """Smallest part of a rank's cap that the schedule of now leaves free, as measured."""

    def edges(self) -> tuple[Edge, ...]:
        """Directed edges between ranks that a step uses."""
        ranks = [self.placement.rank(stage) for stage in range(self.placement.stages)]
        pairs = [(one, other) for one, other in zip(ranks, ranks[1:], strict=False) if one != other]
        return tuple(sorted({*pairs, *((other, one) for one, other in pairs)}))

    def delay(self, edge: Edge) -> float:
        """Seconds of one message over ``edge``."""
        link = self.costs.link_of(edge)
        return link.latency + _largest(self.costs) / link.bandwidth

    def slow_edge(self) -> tuple[Edge, float] | None:
        """The edge that takes longest, and its seconds, if it stands out (``SLOW_EDGE``)."""
        delays = {edge: self.delay(edge) for edge in self.edges()}
        if not delays:
            return None
        worst = max(delays, key=lambda edge: (delays[edge], edge))
        # Both directions of a slow link may be slow: of two ranks' two edges, both.
        usual = median(delays.values()) if len(delays) > 2 else 0.0
        if delays[worst] <= 0.0 or delays[worst] < SLOW_EDGE * usual:
            return None
        return worst, delays[worst]


def link_of(time: EdgeTime, message: float) -> Link:
    """A link on which a message of ``message`` bytes takes ``time``."""
    if time.wire > 0.0 and message > 0.0:
        return Link(latency=max(0.0, time.delay - time.wire), bandwidth=message / time.wire)
    return Link(latency=max(0.0, time.delay))


def _largest(costs: Costs) -> float:
    import numpy as np

    return float(np.max(np.asarray(costs.message, dtype=np.float64)))
