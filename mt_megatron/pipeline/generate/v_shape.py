"""Schedules over the V placement: rank 0 holds the first and the last stage, the last rank the middle two.

ZBV: arXiv 2401.10241, section 6. DualPipeV: the cut-in-half form of DualPipe (arXiv 2412.19437), as its
authors and torch.distributed.pipelining lay it out; a forward and a backward that DualPipeV overlaps in one
step are here one after the other, the forward first.
"""

from __future__ import annotations

from collections import deque

from ..actions import Action, Kind, Placement, Schedule, Style


class _Rank:
    """The actions of one rank as they are added; micro-batches of each stage are counted."""

    def __init__(self, placement: Placement, rank: int) -> None:
        self.actions: list[Action] = []
        self.deferred: deque[Action] = deque()
        self._stages = placement.stages_of(rank)
        self._counts = {(kind, chunk): 0 for kind in (Kind.F, Kind.B) for chunk in (0, 1)}

    def count(self, kind: Kind, chunk: int) -> int:
        """How many F or B of ``chunk`` there are."""
        return self._counts[kind, chunk]

    def add(self, kind: Kind, chunk: int) -> None:
        """The next F, or whole B, of ``chunk``."""
        self.actions.append(Action(kind, self._stages[chunk], self._counts[kind, chunk]))
        self._counts[kind, chunk] += 1

    def add_split(self, chunk: int) -> None:
        """The next B of ``chunk``, with its weight gradients left for later."""
        self.add(Kind.B, chunk)
        self.deferred.append(self.actions[-1]._replace(kind=Kind.W))

    def add_weight(self) -> None:
        """The oldest deferred W, if there is one."""
        if self.deferred:
            self.actions.append(self.deferred.popleft())


def zbv(ranks: int, microbatches: int) -> Schedule:
    """No bubble where F, B and W take equal times and there are at least 2 P - 1 micro-batches; with fewer,
    the schedule of 2 P - 1 without those that are not there."""
    placement, whole = Placement(ranks, 2, Style.V), max(2 * ranks - 1, microbatches)
    made = []
    for rank in range(ranks):
        out, after = _Rank(placement, rank), ranks - rank
        for _ in range(2 * after - 1):
            out.add(Kind.F, 0)
        for _ in range(rank):
            out.add(Kind.F, 1)
            out.add(Kind.F, 0)
        for _ in range(after):
            out.add(Kind.F, 1)
            _backward_and_weight(out, 1)
        while out.count(Kind.F, 1) < whole:
            if out.count(Kind.F, 0) < whole:
                out.add(Kind.F, 0)
            _backward_and_weight(out, 0)
            out.add(Kind.F, 1)
            _backward_and_weight(out, 1)
        for _ in range(rank):
            out.add_split(0)
            out.add_split(1)
        # From here on weight gradients of the first chunk run one after each backward, the last at the end.
        others = deque(action for action in out.deferred if action.stage != placement.stage(rank, 0))
        out.deferred = deque(action for action in out.deferred if action not in others)
        for _ in range(after):
            out.add_split(0)
            out.add_weight()
        actions = [*out.actions, *others, *out.deferred]
        made.append(tuple(action for action in actions if action.microbatch < microbatches))
    return Schedule("zbv", placement, microbatches, tuple(made))


def _backward_and_weight(out: _Rank, chunk: int) -> None:
    out.add_split(chunk)
    out.add_weight()


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """Weight gradients are split off where a rank would wait otherwise, at the beginning and at the end.
    Needs at least 2 P micro-batches."""
    placement = Placement(ranks, 2, Style.V)
    made = []
    for rank in range(ranks):
        out, after = _Rank(placement, rank), ranks - rank - 1
        for _ in range(2 * after):
            out.add(Kind.F, 0)
        for _ in range(rank + 1):
            out.add(Kind.F, 0)
            out.add(Kind.F, 1)
        for _ in range(after):
            _backward_and_weight(out, 1)
            out.add(Kind.F, 1)
        for _ in range(microbatches - 2 * ranks + rank + 1):
            out.add(Kind.F, 0)
            out.add(Kind.B, 1)
            out.add(Kind.F, 1)
            out.add(Kind.B, 0)
        for _ in range(after):
            out.add(Kind.B, 1)
            out.add(Kind.F, 1)
            out.add(Kind.B, 0)
        # The first half of the last backwards is whole, the second half deferred: it fills the drain.
        for number in range(2 * (rank + 1)):
            chunk = 1 - number % 2
            if number < rank + 1:
                out.add(Kind.B, chunk)
            else:
                out.add_split(chunk)
        for _ in range(after):
            out.add_weight()
            out.add_split(0)
        while out.deferred:
            out.add_weight()
        made.append(tuple(out.actions))
    return Schedule("dualpipev", placement, microbatches, tuple(made))
