"""Histories of a pipeline in which one link is slow and another one later: true times of every step.

Two mechanisms, so that what is tuned on one is judged on the other:

``dwell``: exactly one edge is slow; after a fixed number of steps the slowness moves at once to another
edge. ``markov``: slowness comes and goes by chance, ramps up and down over some steps, and meets an edge
drawn anew.

Times are in units of the mean forward of a rank, F. Delays hold for both directions of an edge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mt_megatron.pipeline.actions import Placement
from mt_megatron.pipeline.policy.situation import EdgeTime, Measured
from mt_megatron.pipeline.simulate.costs import Costs, Link

Floats = npt.NDArray[np.float64]

QUARTERS = 4
"""Parts of a rank's layers that a history draws times for: chunks of every placement are made of them."""

HEALTHY = 0.02
"""Delay of a link that is not slow."""

UNEVEN = 0.02
"""Spread of the parts' times about the mean, for a whole history."""

JITTER = 0.015
"""Spread of a rank's times from step to step, and of one micro-batch's from the next."""

DELAY_JITTER = 0.1
"""Spread of a slow link's delay from step to step."""

HICCUP = 0.01
"""Chance of a step in which a link drawn anew is as slow as a slow one, for that step alone."""

DWELLS = (20, 30, 40)
"""Steps that an edge stays slow under ``dwell``; one of them for a whole history."""

MEAN_SLOW, MEAN_HEALTHY, RAMP = 40, 6, 5
"""Mean steps slow and healthy, and steps of a ramp, under ``markov``."""

MEASURED_COMPUTE, MEASURED_DELAY, MEASURED_STEP = 0.01, 0.05, 0.005
"""Spread of measured values about the true ones."""


@dataclass(frozen=True)
class History:
    """True times of one pipeline over ``steps`` steps."""

    ranks: int
    microbatches: int
    parts: Floats
    """Forward of each part, [ranks, QUARTERS]; a rank's parts together take about 1."""

    backward: Floats
    """Whole backward over forward, [ranks]."""

    weight: Floats
    """Part of a backward that computes weight gradients, [ranks]."""

    rank_jitter: Floats
    """[steps, ranks]"""

    pass_jitter: Floats
    """[ranks, micro-batches, 3]: of F, B and W. Each step takes it from another micro-batch on."""

    delays: Floats
    """Seconds of a message from rank i to i + 1, [steps, ranks - 1]."""

    back: Floats
    """And from i + 1 to i."""

    noise: Floats
    """Standard normal numbers for measurements, [steps, 4, ranks]."""

    @property
    def steps(self) -> int:
        return len(self.delays)

    def costs(self, placement: Placement, step: int) -> Costs:
        """True costs of ``step`` under ``placement``."""
        jitter, passes = self.rank_jitter[step], np.roll(self.pass_jitter, 7 * step, axis=1)
        per = QUARTERS // placement.chunks
        shape = placement.stages, self.microbatches
        forward, backward, weight = np.empty(shape), np.empty(shape), np.empty(shape)
        for stage in range(placement.stages):
            rank, chunk = placement.rank(stage), placement.chunk(stage)
            base = self.parts[rank, chunk * per : (chunk + 1) * per].sum() * jitter[rank]
            forward[stage] = base * passes[rank, :, 0]
            whole = base * self.backward[rank]
            part = whole * self.weight[rank] * passes[rank, :, 2]
            weight[stage] = part
            backward[stage] = whole * (1 - self.weight[rank]) * passes[rank, :, 1] + part
        links = {}
        for edge in range(self.ranks - 1):
            links[edge, edge + 1] = Link(latency=float(self.delays[step, edge]))
            links[edge + 1, edge] = Link(latency=float(self.back[step, edge]))
        return Costs(
            forward=forward, backward=backward, weight=weight, link=Link(latency=HEALTHY), links=links
        )

    def measured(
        self, placement: Placement, costs: Costs, step: int, seconds: float, split: bool
    ) -> Measured:
        """Measurements of the ranks in a step that took ``seconds``: means over micro-batches, and of each
        edge half of the round trip."""
        noise = self.noise[step]
        ranks = [placement.rank(stage) for stage in range(placement.stages)]
        spread = 1 + MEASURED_COMPUTE * noise[:3]

        def seen(values: Floats, kind: int) -> list[float]:
            return [float(values[stage].mean() * spread[kind, rank]) for stage, rank in enumerate(ranks)]

        forward, backward, weight = (
            np.asarray(each) for each in (costs.forward, costs.backward, costs.weight)
        )
        edges = {}
        for one, other in zip(ranks, ranks[1:], strict=False):
            if one == other or (one, other) in edges:
                continue
            trip = costs.link_of((one, other)).latency + costs.link_of((other, one)).latency
            factor = 1 + MEASURED_DELAY * noise[3, min(one, other) if abs(one - other) == 1 else -1]
            edges[one, other] = edges[other, one] = EdgeTime(delay=float(max(0.0, trip / 2 * factor)))
        return Measured(
            step=step,
            seconds=float(seconds * (1 + MEASURED_STEP * noise[0, 0])),
            forward=seen(forward, 0),
            backward=None if split else seen(backward, 1),
            input=seen(backward - weight, 1) if split else None,
            weight=seen(weight, 2) if split else None,
            edges=edges,
        )


def draw(mechanism: str, seed: int, *, ranks: int, microbatches: int, steps: int, delay: float) -> History:
    """The history of ``seed`` under ``mechanism`` (``dwell`` or ``markov``) with slow delays of ``delay``."""
    made = np.random.default_rng([seed, ranks, microbatches, {"dwell": 0, "markov": 1}[mechanism]])
    parts = made.lognormal(0, UNEVEN, (ranks, QUARTERS)) / QUARTERS
    backward = made.uniform(1.95, 2.05, ranks)
    weight = made.uniform(0.42, 0.5, ranks)
    rank_jitter = made.lognormal(0, JITTER, (steps, ranks))
    pass_jitter = made.lognormal(0, JITTER, (ranks, microbatches, 3))
    level = (_dwell if mechanism == "dwell" else _markov)(made, ranks - 1, steps)
    for step in np.flatnonzero(made.random(steps) < HICCUP):
        level[step, made.integers(ranks - 1)] = 1.0
    delays, back = (HEALTHY + delay * level * made.lognormal(0, DELAY_JITTER, level.shape) for _ in range(2))
    noise = made.standard_normal((steps, 4, ranks))
    return History(
        ranks, microbatches, parts, backward, weight, rank_jitter, pass_jitter, delays, back, noise
    )


def _dwell(made: np.random.Generator, edges: int, steps: int) -> Floats:
    """Level of slowness, 0 to 1, of each edge, [steps, edges]."""
    dwell = int(made.choice(DWELLS))
    level = np.zeros((steps, edges))
    edge, left = int(made.integers(edges)), int(made.integers(1, dwell + 1))
    for step in range(steps):
        if not left:
            edge, left = int((edge + made.integers(1, edges)) % edges), dwell
        level[step, edge] = 1.0
        left -= 1
    return level


def _markov(made: np.random.Generator, edges: int, steps: int) -> Floats:
    level = np.zeros((steps, edges))
    edge = int(made.integers(edges))
    slow = bool(made.random() < MEAN_SLOW / (MEAN_SLOW + MEAN_HEALTHY))
    now = 1.0 if slow else 0.0
    for step in range(steps):
        level[step, edge] = now
        if made.random() < 1 / (MEAN_SLOW if slow else MEAN_HEALTHY):
            slow = not slow
            if slow and now == 0.0:
                edge = int(made.integers(edges))
        now = min(1.0, now + 1 / RAMP) if slow else max(0.0, now - 1 / RAMP)
    return level
