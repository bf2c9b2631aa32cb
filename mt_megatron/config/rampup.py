"""Sequences per step when the batch size ramps up: a pure function of the samples consumed so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Global batch sizes of a run, as Megatron-LM 0.9's ``--rampup-batch-size`` counts them.

    The ramp's samples are shared equally among the sizes below ``final``: each lasts until its
    share is consumed, and a step begun before that still has the old size.
    """

    final: int
    """Sequences per step after the ramp."""

    start: int | None = None
    """Sequences of the first step; None: ``final`` from the start."""

    increment: int = 1
    """By how much each size is larger than the one before; divides ``final - start``."""

    samples: int = 0
    """Samples that the ramp takes."""

    def at(self, consumed_samples: int) -> int:
        """Sequences of the step that begins after ``consumed_samples``."""
        if self.start is None or self.start >= self.final or consumed_samples > self.samples:
            return self.final
        share = self.samples / ((self.final - self.start) // self.increment)
        risen = int(consumed_samples / share) if share else self.final
        return min(self.final, self.start + risen * self.increment)

    def all(self) -> list[int]:
        """Every size that a step can have, ascending."""
        first = self.final if self.start is None else self.start
        return [*range(first, self.final, self.increment), self.final]

    def samples_after(self, steps: float) -> float:
        """Samples that the first ``steps`` steps consume; part of a step consumes that part of it."""
        if self.start is None:
            return steps * self.final
        consumed = 0
        while steps >= 1 and self.at(consumed) < self.final:
            consumed += self.at(consumed)
            steps -= 1
        return consumed + steps * self.at(consumed)

    def steps_for(self, samples: int) -> int:
        """How many whole steps ``samples`` are enough for."""
        consumed = steps = 0
        while self.at(consumed) < self.final and consumed + self.at(consumed) <= samples:
            consumed += self.at(consumed)
            steps += 1
        if self.at(consumed) < self.final:
            return steps
        return steps + (samples - consumed) // self.final


def batch_sizes(rampup: tuple[int, int, int] | None, global_batch_size: int) -> BatchSizes:
    """The sizes that ``rampup_batch_size`` (start, increment, samples) and the final one describe."""
    if rampup is None:
        return BatchSizes(final=global_batch_size)
    start, increment, samples = rampup
    return BatchSizes(final=global_batch_size, start=start, increment=increment, samples=samples)
