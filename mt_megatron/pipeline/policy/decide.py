"""One decision: which schedule the next steps run, and why. Pure: equal inputs give equal decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...errors import ConfigError
from ..simulate.costs import Edge
from .candidates import ADAPTED, BREADTH_FIRST, DEPTH_FIRST, Candidate, adapted, named
from .situation import Situation

MEMORY_MARGIN = 0.05
"""Part of a cap that a rank must have left. Below it memory is scarce: allocators lose a few per cent to
fragments."""

WIRE_SHARE = 0.3
"""Time for which an edge's wire may be busy, in parts of that for which the busiest rank computes. A
forward is about a third of a rank's work: above it, messages of forwards one after another queue, and
bandwidth is scarce."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Schedule that was chosen, with what the choice follows from."""

    chosen: Candidate
    seconds: float
    """Predicted time of a step under ``chosen``."""

    before: Candidate
    seconds_before: float
    """Predicted time of a step under the schedule of before, with the same inputs."""

    reason: str
    pressure: str | None = None
    """``memory``, ``bandwidth`` or None."""

    slow_edge: tuple[Edge, float] | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Label -> predicted seconds of every schedule that fits the cap."""

    too_large: tuple[str, ...] = ()
    """Labels of schedules that pass the cap."""

    @property
    def switches(self) -> bool:
        return self.chosen.schedule.ranks != self.before.schedule.ranks

    @property
    def gain(self) -> float:
        """Predicted part of a step's time that is saved."""
        return 1.0 - self.seconds / self.seconds_before


def decide(
    situation: Situation,
    current: Candidate,
    *,
    noise: Callable[[str], float] = lambda family: 0.0,
    bias: Mapping[str, float] | None = None,
) -> Decision:
    """The schedule for the next steps.

    ``noise``: part of a step's time by which a schedule of a family must be predicted to be better than
    ``current`` to be worth a switch.
    ``bias``: measured over simulated time by ``Candidate.family``; a family that never ran counts as the mean
    of the others. A schedule that passes the cap is never chosen. Raises ConfigError where none fits it.
    """
    choice = _Choice(situation, current, noise, bias or {})
    if situation.headroom is not None and situation.headroom < MEMORY_MARGIN:
        return choice.for_memory()
    busiest = choice.busiest_wire()
    if busiest is not None and busiest[1] > WIRE_SHARE:
        return choice.for_bandwidth(*busiest)
    return choice.best()


class _Choice:
    def __init__(
        self,
        situation: Situation,
        current: Candidate,
        noise: Callable[[str], float],
        bias: Mapping[str, float],
    ) -> None:
        self.situation, self.current, self.bias = situation, current, bias
        self._noise = noise
        self.costs, self.cap = situation.costs, situation.cap
        self.usual = sum(bias.values()) / len(bias) if bias else 1.0
        self.split = self.costs.weight is not None
        everything = [
            each
            for each in named(situation.placement, situation.microbatches)
            if self.split or not each.schedule.splits_backward
        ]
        self.seconds_before = self.seconds(current)
        self.fitting = [each for each in everything if each.fits(self.costs, self.cap)]
        self.too_large = tuple(each.label for each in everything if each not in self.fitting)
        self.predicted = {each.label: self.seconds(each) for each in self.fitting}
        known = list(self.predicted.values())
        if current.fits(self.costs, self.cap):
            known.append(self.seconds_before)
        self.adapt(self.cap, min(known, default=math.inf))
        if not self.fitting:
            raise ConfigError(
                "no pipeline schedule fits the memory cap of "
                f"{', '.join(f'{each:g}' for each in self.cap or ())} (by rank); expected room for one "
                "micro-batch through all chunks of a rank. Raise the cap or shorten the micro-batches"
            )

    def adapt(self, cap: tuple[float, ...] | None, below: float) -> Candidate | None:
        """The best adapted schedule under ``cap`` that is predicted to take less than ``below`` seconds; it
        joins those that fit."""
        found = None
        for split in (True, False) if self.split else (False,):
            made = adapted(
                self.situation.placement,
                self.situation.microbatches,
                self.costs,
                cap,
                split=split,
                below=below / self.factor(f"{ADAPTED}{'/split' if split else ''}"),
            )
            if made is not None and (seconds := self.seconds(made)) < below:
                found, below = made, seconds
        if found is not None:
            self.fitting.append(found)
            self.predicted[found.label] = below
        return found

    def noise(self, candidate: Candidate) -> float:
        """Seconds that the predicted gain of ``candidate`` must pass."""
        return self._noise(candidate.family) * self.seconds_before

    def factor(self, family: str) -> float:
        """Measured over simulated time."""
        return self.bias.get(family, self.usual)

    def seconds(self, candidate: Candidate) -> float:
        """Predicted seconds of a step."""
        return candidate.program.makespan(self.costs) * self.factor(candidate.family)

    def best(self, note: str = "", pressure: str | None = None) -> Decision:
        """The best simulated that fits, if it is better than ``current`` by more than the noise."""
        # The surest gain: what is predicted for a family that never ran may be wrong.
        found = min(self.fitting, key=lambda each: self.predicted[each.label] + self.noise(each))
        gain, noise = self.seconds_before - self.predicted[found.label], self.noise(found)
        stays = self.current.fits(self.costs, self.cap)
        if stays and gain <= noise:
            return self._decision(
                self.current,
                f"{note}no schedule is predicted to save more than the noise of {noise * 1e3:.3g} ms a step "
                f"({found.label} {gain * 1e3:.3g} ms)",
                pressure,
            )
        why = "best simulated" if stays else "the schedule of before passes the memory cap; best simulated"
        return self._decision(found, f"{note}{why}{self._because_of_edge()}", pressure)

    def for_memory(self) -> Decision:
        """The best of the depth-first schedules, or of an adapted one that keeps no more than they do."""
        costs = self.costs
        pool = [each for each in self.fitting if each.label.split(":")[0] in DEPTH_FIRST]
        note = f"memory is scarce ({self.situation.headroom:.1%} of a cap left)"
        if not pool:
            return self.best(f"{note}, and no depth-first schedule fits; ", "memory")
        least = min(pool, key=lambda each: max(each.peaks(costs)))
        pool = [each for each in pool if max(each.peaks(costs)) <= max(least.peaks(costs))]
        made = self.adapt(least.peaks(costs), min(self.predicted[each.label] for each in pool))
        if made is not None:
            pool.append(made)
        found = min(pool, key=lambda each: self.predicted[each.label])
        smaller = max(found.peaks(costs)) < max(self.current.peaks(costs))
        if not smaller and self.seconds_before - self.predicted[found.label] <= self.noise(found):
            return self._decision(self.current, f"{note}, and no schedule keeps less", "memory")
        return self._decision(found, f"{note}: depth-first (DFC), least activations", "memory")

    def for_bandwidth(self, edge: Edge, share: float) -> Decision:
        """Breadth-first, unless another is predicted to be faster by more than the noise."""
        note = f"the link {edge[0]} -> {edge[1]} is busy for {share:.0%} of the time of computing"
        broad = [each for each in self.fitting if each.label == BREADTH_FIRST]
        if broad:
            best = min(self.predicted.values())
            if self.predicted[BREADTH_FIRST] <= best + self.noise(broad[0]):
                return self._decision(
                    broad[0], f"{note}: breadth-first (BFC), most time for each transfer", "bandwidth"
                )
            slower = self.predicted[BREADTH_FIRST] / best - 1
            return self.best(f"{note}; breadth-first is predicted to be {slower:.1%} slower; ", "bandwidth")
        return self.best(f"{note}, and breadth-first passes the memory cap; ", "bandwidth")

    def busiest_wire(self) -> tuple[Edge, float] | None:
        """The edge whose wire is busy longest, in parts of the time for which the busiest rank computes."""
        situation, program = self.situation, self.current.program
        limited = [e for e in situation.edges() if np.isfinite(self.costs.link_of(e).bandwidth)]
        if not limited:
            return None
        timeline = program.run(self.costs)
        busy = dict.fromkeys(limited, 0.0)
        for transfer in timeline.transfers:
            if transfer.edge in busy:
                busy[transfer.edge] += transfer.sent - transfer.begin
        edge = max(limited, key=lambda each: (busy[each], each))
        # Not of the step: a schedule that waits for the wire leaves it idle at other times.
        return edge, busy[edge] / float(timeline.busy.max())

    def _because_of_edge(self) -> str:
        slow = self.situation.slow_edge()
        if slow is None:
            return ""
        (source, target), seconds = slow
        return f" with the link {source} -> {target} at {seconds * 1e3:.3g} ms a message"

    def _decision(self, chosen: Candidate, reason: str, pressure: str | None = None) -> Decision:
        seconds = self.predicted.get(chosen.label)
        if seconds is None or chosen is self.current:
            seconds = self.seconds(chosen)
        return Decision(
            chosen=chosen,
            seconds=seconds,
            before=self.current,
            seconds_before=self.seconds_before,
            reason=reason,
            pressure=pressure,
            slow_edge=self.situation.slow_edge(),
            predicted=dict(self.predicted),
            too_large=self.too_large,
        )
