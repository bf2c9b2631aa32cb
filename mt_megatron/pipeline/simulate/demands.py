"""Demands of a schedule on its links: the least bandwidth and the longest delay that cost next to nothing.

Makespans never fall when a link gets slower, so both are found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .costs import PERFECT, Costs, Floats, Link
from .program import Program

TOLERANCE = 0.01
"""Part by which a step may grow before links count as too slow."""

_TRIED_AT_ONCE = 16
_ROUNDS = 4
"""Of ``_TRIED_AT_ONCE`` values between two: the result is exact to 2e-5 of the range."""


@dataclass(frozen=True)
class Demands:
    """Of all links at once, everything else being equal."""

    bandwidth: float
    """Bytes per second with which the step is ``TOLERANCE`` longer than with unlimited ones; 0 where nothing
    is sent."""

    latency: float
    """Seconds of delay of every message with which it is so much longer."""

    send_window: float
    """Mean of the seconds that a message may take before the receiving rank waits, over perfect links."""

    reduction_window: float
    """Mean of the seconds that a stage's gradient reduction may take before the step grows."""


def demands(program: Program, costs: Costs, tolerance: float = TOLERANCE) -> Demands:
    """What ``program`` demands with the computations, sizes and reductions of ``costs``; its links do not
    count."""
    perfect = replace(costs, link=PERFECT, links={})
    timeline = program.run(perfect)
    limit = timeline.makespan * (1.0 + tolerance)

    def slower(made: Callable[[float], Link]) -> Callable[[Floats], Floats]:
        return lambda values: program.makespans([replace(perfect, link=made(value)) for value in values])

    transfers, reductions = timeline.transfers, timeline.reductions
    bandwidth = latency = 0.0
    if transfers:
        size = max(transfer.bytes for transfer in transfers)
        # Seconds per message are bounded by the step, in which at least one has to fit.
        if size:
            bandwidth = size / _largest(slower(lambda value: Link(bandwidth=size / value)), limit)
        latency = _largest(slower(lambda value: Link(latency=value)), limit)
    return Demands(
        bandwidth=bandwidth,
        latency=latency,
        send_window=float(np.mean([each.window for each in transfers])) if transfers else 0.0,
        reduction_window=float(np.mean([each.end - each.ready + each.slack for each in reductions]))
        if reductions
        else 0.0,
    )


def _largest(makespans: Callable[[Floats], Floats], limit: float) -> float:
    """The largest seconds per message with which the step takes no longer than ``limit``."""
    low, high = 0.0, limit
    for _ in range(_ROUNDS):
        values = np.linspace(low, high, _TRIED_AT_ONCE + 2)[1:-1]
        fits = makespans(values) <= limit
        count = int(np.argmin(fits)) if not fits.all() else len(values)
        low, high = (values[count - 1] if count else low), (values[count] if count < len(values) else high)
    return float(low) if low else float(high)
