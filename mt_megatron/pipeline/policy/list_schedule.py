"""List scheduling on measured times: each rank starts the best task that is ready, under a memory cap.

The whole pipeline is laid out in time, action by action. Whenever a rank becomes free it takes, among the
tasks whose inputs have arrived, the first by a fixed rule; the order that results is the schedule. Delays of
links thereby decide how far each rank runs ahead. Micro-batches of one stage keep their order, so that sums
of gradients keep theirs.

Memory: an F starts only if its activation fits under the cap of its rank, and if what is left still lets the
two oldest micro-batches of the rank run through all of its chunks. The oldest micro-batch of the pipeline can
therefore always go on, and no rank waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from ...errors import ConfigError
from ..actions import Action, Kind, Placement, Schedule
from ..simulate.costs import Costs, per_stage

_INFINITE = math.inf

_EXACT = 1e-9
"""Relative part by which sums of activations may pass a cap: the rounding of their additions, which is far
below the size of one activation."""

_BACKWARD, _FORWARD, _WEIGHT = 0, 1, 2
_KINDS = (Kind.B, Kind.F, Kind.W)


class Rule(NamedTuple):
    """Which of several ready tasks a rank takes first. W comes last in every rule."""

    backward_first: bool = True
    """B before F, otherwise F before B."""

    deep_forward: bool = True
    """F of the last chunk before the first: a micro-batch goes through. Otherwise the first chunk first."""

    deep_backward: bool = True
    """B of the last chunk before the first; otherwise the first chunk first, which ends micro-batches."""

    split: bool = True
    """Weight gradients are split off (W) and fill waiting times."""

    patience: float = 0.0
    """A rank waits for a task that comes before by this rule and arrives later by up to this part of the time
    of the task that it could start at once."""

    def __str__(self) -> str:
        return (
            f"{'B' if self.backward_first else 'F'} first, "
            f"{'deep' if self.deep_forward else 'shallow'} F, "
            f"{'deep' if self.deep_backward else 'shallow'} B, "
            f"{'split' if self.split else 'whole'} backward"
        )


def rules(chunks: int, *, split: bool) -> tuple[Rule, ...]:
    """Rules that differ on ranks of ``chunks`` chunks; those that split the backward only if ``split``."""
    depths = [True, False] if chunks > 1 else [True]
    splits = [True, False] if split else [False]
    return tuple(Rule(*each) for each in product([True, False], depths, depths, splits))


def list_schedule(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    cap: Sequence[float] | None = None,
    rule: Rule | None = None,
    *,
    name: str = "adapted",
) -> Schedule:
    """The schedule that ``rule`` (default: ``Rule()``) makes of ``costs``.

    ``cap``: memory that each rank may hold, [ranks], in the unit of ``costs.activation`` and with
    ``costs.static`` in it; None: no limit. Reductions are not laid out. Raises ConfigError where a cap is
    too small for one micro-batch, or a rule splits the backward and the costs name no weight gradients.
    """
    return _Layout(placement, microbatches, costs, cap, rule or Rule()).schedule(name)


class _Layout:
    """The pipeline while it is laid out."""

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        cap: Sequence[float] | None,
        rule: Rule,
    ) -> None:
        stages, count = placement.stages, microbatches
        self.placement, self.microbatches, self.rule = placement, count, rule
        self.rank = [placement.rank(stage) for stage in range(stages)]
        self.own = [placement.stages_of(rank) for rank in range(placement.ranks)]
        self.seconds = _seconds(costs, stages, count, rule.split)
        self.size = per_stage(costs.activation, stages, count, "activation").tolist()
        self.kept = costs.weight_share if rule.split else 0.0
        self.room = self._room(costs, cap)
        self.lag, self.wire = self._links(costs)
        self.priority = self._priorities()
        # Times at which inputs are there: of each F, and of each B as far as it waits for another stage.
        self.arrived: list[list[list[float]]] = [
            [[_INFINITE] * count for _ in range(stages)],
            [[_INFINITE] * count if stage else [0.0] * count for stage in range(stages)],
        ]
        self.done = [[0] * stages for _ in _KINDS]
        self.free = [0.0] * placement.ranks
        self.held = [0.0] * placement.ranks
        self.younger = [0.0] * placement.ranks
        """Memory held by micro-batches after the two oldest."""
        self.oldest = [0] * placement.ranks
        self.wire_free: dict[tuple[int, int], float] = {}
        self.actions: list[list[Action]] = [[] for _ in range(placement.ranks)]

    def schedule(self, name: str) -> Schedule:
        ready = [self._ready(rank) for rank in range(self.placement.ranks)]
        left = (3 if self.rule.split else 2) * self.placement.stages * self.microbatches
        for _ in range(left):
            # No message that arrives before the earliest start can still be sent: starts never decrease.
            rank = min(range(len(ready)), key=lambda each: ready[each][0])
            for changed in self._start(rank, *ready[rank][1:]):
                ready[changed] = self._ready(changed)
        return Schedule(
            name, self.placement, self.microbatches, tuple(tuple(actions) for actions in self.actions)
        )

    def _ready(self, rank: int) -> tuple[float, int, int]:
        """When ``rank`` can start its next action, and which: kind and stage."""
        now, count = self.free[rank], self.microbatches
        backward, forward, weight = self.done
        found: list[tuple[float, int, int, int]] = []
        for stage in self.own[rank]:
            index = backward[stage]
            if index < forward[stage] and (time := self.arrived[_BACKWARD][stage][index]) < _INFINITE:
                found.append((max(time, now), self.priority[_BACKWARD][stage], _BACKWARD, stage))
            if self.rule.split and weight[stage] < index:
                found.append((now, self.priority[_WEIGHT][stage], _WEIGHT, stage))
            index = forward[stage]
            if index < count and (time := self.arrived[_FORWARD][stage][index]) < _INFINITE:
                if self._fits(rank, stage, index):
                    found.append((max(time, now), self.priority[_FORWARD][stage], _FORWARD, stage))
        if not found:
            return _INFINITE, 0, 0
        time, first, kind, stage = min(found)
        limit = time + self.rule.patience * self.seconds[kind][stage][self.done[kind][stage]]
        for each in found:
            if each[1] < first and each[0] <= limit:
                time, first, kind, stage = each
        return time, kind, stage

    def _fits(self, rank: int, stage: int, index: int) -> bool:
        """Whether the F may start without a rank that waits for ever later on."""
        room, size = self.room[rank], self.size[stage][index]
        if room == _INFINITE:
            return True
        oldest, forward = self.oldest[rank], self.done[_FORWARD]
        need = self.held[rank] + size
        if index > oldest:
            need += sum(self.size[each][oldest] for each in self.own[rank] if forward[each] <= oldest)
        if need > room:
            return False
        if index <= oldest + 1:
            return True
        return self.younger[rank] + size + sum(self.size[each][oldest + 1] for each in self.own[rank]) <= room

    def _start(self, rank: int, kind: int, stage: int) -> tuple[int, ...]:
        """Lay out the next action of ``kind`` of ``stage``; the ranks whose next action may change."""
        index = self.done[kind][stage]
        self.done[kind][stage] += 1
        begin = max(self.free[rank], self.arrived[kind][stage][index] if kind != _WEIGHT else 0.0)
        end = self.free[rank] = begin + self.seconds[kind][stage][index]
        self.actions[rank].append(Action(_KINDS[kind], stage, index))
        size = self.size[stage][index]
        if kind == _FORWARD:
            self._hold(rank, index, size)
            to = stage + 1
            if to == self.placement.stages:
                self.arrived[_BACKWARD][stage][index] = end
                return (rank,)
        else:
            self._hold(rank, index, -size * (self.kept if kind == _WEIGHT else 1.0 - self.kept))
            self._complete(rank)
            if kind == _WEIGHT or stage == 0:
                return (rank,)
            to = stage - 1
        other = self.rank[to]
        self.arrived[kind][to][index] = self._arrival(rank, other, kind, stage, index, end)
        return (rank,) if other == rank else (rank, other)

    def _arrival(self, rank: int, other: int, kind: int, stage: int, index: int, end: float) -> float:
        if other == rank:
            return end
        sends = self.wire[rank, other]
        if sends is None:
            return end + self.lag[rank, other]
        # The gradient that goes back has the bytes of the output before it.
        seconds = sends[stage if kind == _FORWARD else stage - 1][index]
        sent = max(end, self.wire_free.get((rank, other), 0.0)) + seconds
        self.wire_free[rank, other] = sent
        return sent + self.lag[rank, other]

    def _hold(self, rank: int, index: int, size: float) -> None:
        self.held[rank] += size
        if index > self.oldest[rank] + 1:
            self.younger[rank] += size

    def _complete(self, rank: int) -> None:
        """Move on the oldest micro-batch of ``rank`` whose memory is not free yet."""
        last = self.done[_WEIGHT if self.rule.split else _BACKWARD]
        oldest = min(last[stage] for stage in self.own[rank])
        if oldest != self.oldest[rank]:
            self.oldest[rank] = oldest
            self.younger[rank] = sum(self._kept(stage, oldest + 2) for stage in self.own[rank])

    def _kept(self, stage: int, first: int) -> float:
        """Memory that micro-batches of ``stage`` from ``first`` on hold."""
        backward, forward, weight = (done[stage] for done in self.done)
        sizes = self.size[stage]
        whole = sum(sizes[max(first, backward) : forward])
        return whole + self.kept * sum(sizes[max(first, weight) : backward]) if self.rule.split else whole

    # -- what follows from the arguments

    def _room(self, costs: Costs, cap: Sequence[float] | None) -> list[float]:
        """Memory for activations of each rank."""
        ranks = self.placement.ranks
        if cap is None:
            return [_INFINITE] * ranks
        if len(cap) != ranks:
            raise ConfigError(f"found caps of {len(cap)} ranks; expected {ranks}")
        static = per_stage(costs.static, self.placement.stages, 1, "static")
        found = []
        for rank, most in enumerate(cap):
            own = self.own[rank]
            room = float(most) - sum(float(static[stage, 0]) for stage in own)
            need = max(sum(sizes) for sizes in zip(*(self.size[stage] for stage in own), strict=True))
            room += _EXACT * abs(room)
            if need > room:
                raise ConfigError(
                    f"rank {rank}: one micro-batch needs {need:g} of activations in its {len(own)} chunks "
                    f"and the cap leaves {room:g}; raise the cap or shorten the micro-batches"
                )
            found.append(room)
        return found

    def _links(
        self, costs: Costs
    ) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], list[list[float]] | None]]:
        """Latency of each directed edge, and seconds that each message takes its wire: None for none."""
        stages, count = self.placement.stages, self.microbatches
        message = per_stage(costs.message, stages, count, "message")
        lag: dict[tuple[int, int], float] = {}
        wire: dict[tuple[int, int], list[list[float]] | None] = {}
        for one, other in zip(self.rank, self.rank[1:], strict=False):
            for edge in ((one, other), (other, one)):
                if one != other and edge not in lag:
                    link = costs.link_of(edge)
                    lag[edge] = link.latency
                    wire[edge] = (
                        None if math.isinf(link.bandwidth) else (message / link.bandwidth).tolist()
                    )
        return lag, wire

    def _priorities(self) -> list[list[int]]:
        """Rank of each kind and stage among tasks that are ready at the same time; the first is taken."""
        rule, chunks = self.rule, self.placement.chunks
        order = [0, 1, 2] if rule.backward_first else [1, 0, 2]
        found = []
        for kind, deep in ((_BACKWARD, rule.deep_backward), (_FORWARD, rule.deep_forward), (_WEIGHT, True)):
            chunk = [self.placement.chunk(stage) for stage in range(self.placement.stages)]
            found.append([order[kind] * chunks + (chunks - 1 - each if deep else each) for each in chunk])
        return found


def _seconds(costs: Costs, stages: int, microbatches: int, split: bool) -> list[list[list[float]]]:
    """Seconds of B, F and W, each [stages][micro-batches]."""
    forward = per_stage(costs.forward, stages, microbatches, "forward").tolist()
    backward = per_stage(costs.backward, stages, microbatches, "backward")
    if not split:
        return [backward.tolist(), forward, []]
    if costs.weight is None:
        raise ConfigError(
            "the rule splits the backward, and the costs name no time of its weight gradients; give "
            "Costs(weight=...)"
        )
    weight = per_stage(costs.weight, stages, microbatches, "weight")
    inputs = (
        backward - weight
        if costs.input is None
        else per_stage(costs.input, stages, microbatches, "input")
    )
    if inputs.min() < 0:
        raise ConfigError(
            f"found weight gradients of {costs.weight} s in a backward of {costs.backward} s; expected the "
            "part to be smaller than the whole"
        )
    return [inputs.tolist(), forward, weight.tolist()]
