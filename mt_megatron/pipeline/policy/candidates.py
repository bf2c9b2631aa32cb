"""Schedules that a policy may choose from: those with a name, and one adapted to the times of now."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ...errors import ConfigError
from ..actions import Placement, Schedule, Style
from ..generate.catalogue import generate
from ..simulate.costs import Costs
from ..simulate.memory import memory_peaks
from ..simulate.program import Program
from .list_schedule import Rule, list_schedule, rules

ADAPTED = "adapted"
"""Label of a schedule that was made for the times of now."""

DEPTH_FIRST = ("1f1b", "depth_first", "hybrid")
"""Names of schedules that keep few activations (DFC)."""

BREADTH_FIRST = "breadth_first"
"""Name of the schedule with the most time for each transfer and reduction (BFC)."""

_MOST_PEAKS = 8
"""Memory peaks that a candidate keeps, by costs."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule that can run."""

    label: str
    """As in ``--pipeline-schedule``, or ``adapted`` with the rule behind it."""

    schedule: Schedule
    _peaks: dict[str, tuple[float, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def program(self) -> Program:
        """``schedule`` ready to be timed. Made on first use: what does not fit a cap never is."""
        return Program(self.schedule)

    @property
    def family(self) -> str:
        """What measured times of this candidate tell something about: its name, and whether the backward is
        split."""
        return f"{self.label.split(':')[0]}{'/split' if self.schedule.splits_backward else ''}"

    @cached_property
    def digest(self) -> str:
        """Digest of the order of every rank's actions."""
        text = repr([[str(action) for action in rank] for rank in self.schedule.ranks])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def peaks(self, costs: Costs) -> tuple[float, ...]:
        """Memory that each rank holds at most, [ranks], in the unit of ``costs.activation``."""
        key = repr((costs.activation, costs.static, costs.weight_share))
        if key not in self._peaks:
            if len(self._peaks) >= _MOST_PEAKS:
                self._peaks.clear()
            self._peaks[key] = tuple(float(each) for each in memory_peaks(self.schedule, costs))
        return self._peaks[key]

    def fits(self, costs: Costs, cap: Sequence[float] | None) -> bool:
        """True where no rank passes its cap."""
        if cap is None:
            return True
        # The rounding of sums, far below the size of one activation.
        return all(peak <= most * (1 + 1e-9) for peak, most in zip(self.peaks(costs), cap, strict=True))


@lru_cache(maxsize=16)
def named(placement: Placement, microbatches: int) -> tuple[Candidate, ...]:
    """Every named schedule of ``placement``, the default of Megatron-Core's placement first."""
    names = _names(placement, microbatches)
    found = (_called(name, group, placement, microbatches) for name, group in names)
    return tuple(each for each in found if each is not None)


@lru_cache(maxsize=256)
def _called(name: str, group: int | None, placement: Placement, microbatches: int) -> Candidate | None:
    """None for a number of micro-batches that the schedule cannot have."""
    try:
        schedule = generate(
            name,
            ranks=placement.ranks,
            chunks=placement.chunks,
            microbatches=microbatches,
            group=group,
        )
    except ConfigError:
        return None
    return Candidate(name if group is None else f"{name}:{group}", schedule)


def _names(placement: Placement, microbatches: int) -> Iterator[tuple[str, int | None]]:
    ranks = placement.ranks
    if placement.style is Style.V:
        yield from (("zbv", None), ("dualpipev", None))
        return
    if placement.chunks == 1:
        yield from (("1f1b", None), ("zb_h1", None), (BREADTH_FIRST, None))
        return
    yield from (("interleaved", None), ("depth_first", None), ("zb_h1", None), (BREADTH_FIRST, None))
    # Larger groups hide more of a link's delay at the turn from one chunk to the next, for more memory.
    for group in (ranks * 5 // 4, ranks * 3 // 2, ranks * 2):
        if ranks < group <= microbatches:
            yield from (("hybrid", group), ("zb_h1", group))


def default_of(placement: Placement, microbatches: int) -> Candidate:
    """The schedule that a run begins with: Megatron-Core's own where the placement has one."""
    names = _names(placement, microbatches)
    found = (_called(name, group, placement, microbatches) for name, group in names)
    return next(each for each in found if each is not None)


def adapted(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    cap: Sequence[float] | None,
    *,
    split: bool,
    below: float = math.inf,
) -> Candidate | None:
    """The best list schedule of ``costs`` under ``cap``; None where no rule fits the cap or takes less than
    ``below`` seconds."""
    best: tuple[float, Schedule, Rule] | None = None
    for rule in rules(placement, microbatches, split=split):
        limit = below if best is None else best[0]
        try:
            made = list_schedule(placement, microbatches, costs, cap, rule, below=limit, name=ADAPTED)
        except ConfigError:
            continue  # The cap is too small for this rule.
        if made is not None:
            best = made[1], made[0], rule
    return None if best is None else Candidate(f"{ADAPTED}: {best[2]}", best[1])
