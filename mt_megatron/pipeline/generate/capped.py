"""List scheduling under a cap of activations: each rank runs the next task that is ready.

The order is that of a simulated step with the given costs and links, so a rank whose messages come late runs
further ahead, as far as its cap lets it. Every cap of at least one activation per chunk can be kept without
the ranks waiting for each other for ever: forwards run in groups small enough that the first backward of a
group comes before the cap, or a forward that leaves too little room to finish older micro-batches is held
back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from ...errors import ConfigError
from ..actions import Action, Kind, Placement, Schedule
from ..simulate.costs import Costs, Floats, Link, per_stage
from .looping import forward_order

_SAME_TIME = 1e-9
"""Share of a forward's time that counts as no time: sums of the same costs in another order differ by
rounding."""


class _Channel:
    """One directed edge while transfers begin one after another."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free = 0.0
        self._arrivals: deque[float] = deque([-inf] * (link.window or 0), maxlen=link.window)

    def arrival(self, ready: float, size: float) -> float:
        """When a message of ``size`` bytes that is ready at ``ready`` arrives."""
        begin = max(ready, self._free, self._arrivals[0] if self._link.window else -inf)
        self._free = begin + size / self._link.bandwidth
        arrived = self._free + self._link.latency
        if self._link.window:
            self._arrivals.append(arrived)
        return arrived


class _Rank:
    """Progress of one rank."""

    def __init__(self, stages: tuple[int, ...], cap: int) -> None:
        self.stages, self.cap = stages, cap
        self.forwards = [0] * len(stages)
        self.backwards = [0] * len(stages)
        self.kept = 0
        """Activations, until B, or W where the backward is split."""
        self.deferred: deque[Action] = deque()
        self.busy_until = 0.0
        self.actions: list[Action] = []

    def may_forward(self, chunk: int) -> bool:
        """True where a forward of ``chunk`` leaves room to finish the micro-batches that were begun, the
        oldest first; room that deferred weight gradients hold can be had back."""
        forwards = self.forwards.copy()
        forwards[chunk] += 1
        room = self.cap - (self.kept - len(self.deferred)) - 1
        batch = min(self.backwards)
        while 0 <= room < len(forwards) and batch < forwards[0]:
            needs = held = 0
            for forward, backward in zip(forwards, self.backwards, strict=True):
                needs += forward <= batch
                held += backward <= batch < forward
            if needs > room:
                return False
            room += held
            batch += 1
        return room >= 0


def capped(
    placement: Placement,
    microbatches: int,
    caps: Sequence[int],
    *,
    costs: Costs,
    group: int | None = None,
    turns: bool = True,
    split: bool = False,
    name: str = "memory_capped",
) -> Schedule:
    """The schedule of ``placement`` in which no rank r keeps more than ``caps[r]`` activations (micro-batches
    of one chunk).

    ``group``: forwards and backwards run in the order of the depth-first schedule with groups of so many
    micro-batches; None: any forward that is ready may run, that of the last chunk first, and the backward of
    the oldest micro-batch. ``turns``: a forward follows a backward where both are ready; otherwise backwards
    go first. ``split``: weight gradients are split off and run when nothing else is ready or may run. Raises
    ConfigError for caps that are too small: ``(chunks - 1) * group + 1``, or the chunks without groups.
    """
    least = placement.chunks if group is None else (placement.chunks - 1) * group + 1
    if too_small := [rank for rank, cap in enumerate(caps) if cap < least]:
        raise ConfigError(
            f"found a cap of {caps[too_small[0]]} activations on rank {too_small[0]}; expected at least "
            f"{least} with {placement.chunks} chunks"
            + (f" in groups of {group} micro-batches" if group else "")
        )
    if split and costs.weight is None:
        raise ConfigError("found no time of weight gradients, which a split backward needs; give weight=...")
    return _Scheduling(placement, microbatches, caps, costs, group, turns, split).run(name)


class _Scheduling:
    """One run of the list scheduling."""

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        caps: Sequence[int],
        costs: Costs,
        group: int | None,
        turns: bool,
        split: bool,
    ) -> None:
        self._placement, self._microbatches, self._costs = placement, microbatches, costs
        self._turns, self._split = turns, split
        stages = placement.stages
        self._order = None if group is None else list(forward_order(placement.chunks, microbatches, group))
        self._ranks = [_Rank(placement.stages_of(rank), caps[rank]) for rank in range(placement.ranks)]
        forward = per_stage(costs.forward, stages, microbatches, "forward")
        backward = per_stage(costs.backward, stages, microbatches, "backward")
        seconds: dict[Kind, Floats] = {Kind.F: forward, Kind.B: backward}
        if split:
            assert costs.weight is not None
            seconds[Kind.W] = per_stage(costs.weight, stages, microbatches, "weight")
            seconds[Kind.B] = (
                backward - seconds[Kind.W]
                if costs.input is None
                else per_stage(costs.input, stages, microbatches, "input")
            )
        self._seconds = {kind: values.tolist() for kind, values in seconds.items()}
        self._message = per_stage(costs.message, stages, microbatches, "message").tolist()
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._tolerance = _SAME_TIME * float(forward.mean())
        self._arrived = {kind: [[inf] * microbatches for _ in range(stages)] for kind in (Kind.F, Kind.B)}
        self._arrived[Kind.F][0] = [0.0] * microbatches
        self._events = [(0.0, rank) for rank in range(placement.ranks)]

    def run(self, name: str) -> Schedule:
        while self._events:
            now, number = heappop(self._events)
            rank = self._ranks[number]
            if rank.busy_until > now + self._tolerance:
                continue
            if (action := self._next(rank, now + self._tolerance)) is not None:
                self._begin(number, rank, action, max(now, rank.busy_until))
        ranks = tuple(tuple(rank.actions) for rank in self._ranks)
        return Schedule(name, self._placement, self._microbatches, ranks)

    def _next(self, rank: _Rank, now: float) -> Action | None:
        """Action that ``rank`` begins now."""
        backward, forward = self._backward(rank, now), self._forward(rank, now)
        if forward is not None and rank.kept == rank.cap:
            forward = None  # Only a backward or a deferred weight gradient makes room.
        after_backward = self._turns and rank.actions and rank.actions[-1].kind is Kind.B
        chosen = (forward or backward) if after_backward else (backward or forward)
        return chosen or (rank.deferred.popleft() if rank.deferred else None)

    def _backward(self, rank: _Rank, now: float) -> Action | None:
        """The next backward, if its gradient has arrived."""
        chunks: Sequence[int] = range(len(rank.stages))
        if self._order is not None:
            done = sum(rank.backwards)
            chunks = range(0) if done == len(self._order) else (len(rank.stages) - 1 - self._order[done][0],)
        ready = []
        for chunk in chunks:
            batch, stage = rank.backwards[chunk], rank.stages[chunk]
            if batch < rank.forwards[chunk] and self._arrived[Kind.B][stage][batch] <= now:
                ready.append((batch, stage))
        return Action(Kind.B, min(ready)[1], min(ready)[0]) if ready else None

    def _forward(self, rank: _Rank, now: float) -> Action | None:
        """The next forward, if its input has arrived; without groups, if it may run besides."""
        chunks: Sequence[int] = range(len(rank.stages) - 1, -1, -1)
        if self._order is not None:
            done = sum(rank.forwards)
            chunks = range(0) if done == len(self._order) else (self._order[done][0],)
        for chunk in chunks:
            batch, stage = rank.forwards[chunk], rank.stages[chunk]
            ready = batch < self._microbatches and self._arrived[Kind.F][stage][batch] <= now
            if ready and (self._order is not None or rank.may_forward(chunk)):
                return Action(Kind.F, stage, batch)
        return None

    def _begin(self, number: int, rank: _Rank, action: Action, now: float) -> None:
        kind, stage, batch = action
        end = now + self._seconds[kind][stage][batch]
        rank.actions.append(action)
        rank.busy_until = end
        chunk = self._placement.chunk(stage)
        if kind is Kind.F:
            rank.forwards[chunk] += 1
            rank.kept += 1
            if stage == self._placement.stages - 1:
                self._arrived[Kind.B][stage][batch] = end
            else:
                self._deliver(Kind.F, number, stage + 1, batch, end, self._message[stage][batch])
        elif kind is Kind.B:
            rank.backwards[chunk] += 1
            if self._split:
                rank.deferred.append(action._replace(kind=Kind.W))
            else:
                rank.kept -= 1
            if stage > 0:
                self._deliver(Kind.B, number, stage - 1, batch, end, self._message[stage - 1][batch])
        else:
            rank.kept -= 1
        heappush(self._events, (end, number))

    def _deliver(self, kind: Kind, source: int, stage: int, batch: int, ready: float, size: float) -> None:
        target = self._placement.rank(stage)
        if target == source:
            self._arrived[kind][stage][batch] = ready
            return
        edge = source, target
        if edge not in self._channels:
            self._channels[edge] = _Channel(self._costs.link_of(edge))
        arrived = self._channels[edge].arrival(ready, size)
        self._arrived[kind][stage][batch] = arrived
        heappush(self._events, (arrived, target))
