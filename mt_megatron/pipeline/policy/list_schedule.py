"""List scheduling on measured times: each rank starts the most urgent task that is ready, under a memory cap.

The whole pipeline is laid out in time, action by action. Whenever a rank becomes free it takes, among the
tasks whose inputs have arrived, the one that has to start first if the step is to end in time: its latest
start, which is the length of the path from it to the end of the step, delays of links included (critical-path
list scheduling). Delays thereby decide how far each rank runs ahead. A W delays nothing but what its memory
could be used for: where a forward has arrived and waits for memory, a W is as urgent as that forward,
otherwise it comes last. Micro-batches of one stage keep their order, so that sums of gradients keep theirs.

Memory: an F starts only if its activation fits under the cap of its rank, and if what is left still lets the
two oldest micro-batches of the rank run through all of its chunks. The oldest micro-batch of the pipeline can
therefore always go on, and no rank waits for ever. Rules with groups reach the first backward of a group
before the cap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...errors import ConfigError, MtMegatronError
from ..actions import Action, Kind, Placement, Schedule, Style
from ..generate.looping import forward_order
from ..simulate.costs import Costs, per_stage

PATIENCE = (0.2, 0.5)
"""Values of ``Rule.patience`` that are tried, in parts of a task's time. Below 0.2 a rank starts a W just
before a B arrives; above 0.5 it idles; in between neither is best everywhere."""

PACE = (1.0, 1.5)
"""Values of ``Rule.pace`` that are tried, in parts of the time that the busiest rank needs for the forwards
of one micro-batch. Where nothing else holds them up, micro-batches follow each other at 1: forwards at the
begin of a step, and backwards whose weight gradients are put off at its end. In between they take turns."""

_INFINITE = math.inf

_ROUNDING = 1e-9
"""Part of a cap by which sums of activations may pass it: the rounding of their additions, far below the size
of one activation."""

_BACKWARD, _FORWARD, _WEIGHT = 0, 1, 2
_KINDS = (Kind.B, Kind.F, Kind.W)

_LAST = 0.0
"""Latest start of a W that no forward waits for: seconds before the end of the step, which those of all other
tasks are further away from."""

_Found = tuple[float, float, int, int]
"""When a task can start, its latest start, its kind and its stage."""


class Rule(NamedTuple):
    """Urgency of tasks, and which of them may run."""

    pace: float = PACE[0]
    """Time from one micro-batch to the next, by which the latest start of the earlier one is earlier; in the
    unit of ``PACE``. A short one makes ranks run further ahead with forwards."""

    group: int | None = None
    """Chunks follow each other as in the depth-first schedule with groups of so many micro-batches. None:
    any chunk may run."""

    split: bool = True
    """Weight gradients are split off (W) and fill waiting times."""

    patience: float = PATIENCE[0]
    """A rank waits for a more urgent task that arrives later by up to this part of the time of the task that
    it could start at once."""

    def __str__(self) -> str:
        chunks = "" if self.group is None else f"groups of {self.group}, "
        return (
            f"most urgent first, {chunks}{'split' if self.split else 'whole'} backward, pace {self.pace:g}, "
            f"patience {self.patience:g}"
        )


def rules(placement: Placement, microbatches: int, *, split: bool) -> tuple[Rule, ...]:
    """Rules to try on ``placement``, with a split or a whole backward, the ones that win most often first."""
    orders: list[dict[str, Any]] = [{"pace": pace} for pace in PACE]
    if placement.chunks == 1:
        orders = orders[:1]  # One chunk's forwards and backwards come in the same order at every pace.
    elif placement.style is Style.LOOP:
        # A group a quarter larger than the ranks hides a delay of up to that many passes at each turn.
        groups = {min(each, microbatches) for each in (placement.ranks, placement.ranks * 5 // 4)}
        orders += [{"group": each} for each in sorted(groups)]
    if not split:
        # Nothing fills the waiting times of whole backwards: they are worth a try where splitting costs much.
        return tuple(Rule(split=False, **order) for order in (orders[0], *orders[len(PACE) : len(PACE) + 1]))
    return tuple(Rule(patience=patience, **order) for order in orders for patience in PATIENCE)


def list_schedule(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    cap: Sequence[float] | None = None,
    rule: Rule | None = None,
    *,
    below: float = _INFINITE,
    name: str = "adapted",
) -> tuple[Schedule, float] | None:
    """The schedule that ``rule`` (default: ``Rule()``) makes of ``costs``, and the seconds that it takes with
    them, without reductions. None if it takes ``below`` seconds or more, which is often seen early.

    ``cap``: memory that each rank may hold, [ranks], in the unit of ``costs.activation`` and with
    ``costs.static`` in it; None: no limit. Raises ConfigError where a cap is too small for the rule, or a
    rule splits the backward and the costs name no weight gradients.
    """
    return _Layout(placement, microbatches, costs, cap, rule or Rule()).lay_out(name, below)


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
        stages, ranks = placement.stages, placement.ranks
        self.placement, self.microbatches, self.rule = placement, microbatches, rule
        self.rank = [placement.rank(stage) for stage in range(stages)]
        self.own = [placement.stages_of(rank) for rank in range(ranks)]
        self.seconds = _seconds(costs, stages, microbatches, rule.split)
        self.size: list[list[float]] = per_stage(
            costs.activation, stages, microbatches, "activation"
        ).tolist()
        self.kept = costs.weight_share if rule.split else 0.0
        """Part of an activation that is kept from B to W."""
        self.room: list[float] = self._room(costs, cap)
        self.whole: list[float] = [
            max(sum(sizes) for sizes in zip(*(self.size[stage] for stage in own), strict=True))
            for own in self.own
        ]
        """Memory of the largest micro-batch in all chunks of each rank."""
        self.lag, self.wire = self._links(costs)
        self.latest = self._latest_starts()
        self.order = (
            []
            if rule.group is None
            else [chunk for chunk, _ in forward_order(placement.chunks, microbatches, rule.group)]
        )
        """Chunks of the forwards of every rank, one after the other; empty: any order."""
        # When inputs are there, by kind, stage and micro-batch: of a last stage's B, the end of its F.
        self.arrived = [[[_INFINITE] * microbatches for _ in range(stages)] for _ in _KINDS[:2]]
        self.arrived[_FORWARD][0] = [0.0] * microbatches
        self.done = [[0] * stages for _ in _KINDS]
        self.count = [[0] * ranks for _ in _KINDS]
        self.free = [0.0] * ranks
        self.held = [0.0] * ranks
        self.younger = [0.0] * ranks
        """Memory held by micro-batches after the two oldest."""
        self.oldest = [0] * ranks
        """First micro-batch whose memory is not free yet."""
        self.wire_free: dict[tuple[int, int], float] = {}
        self.actions: list[list[Action]] = [[] for _ in range(ranks)]

    def lay_out(self, name: str, below: float) -> tuple[Schedule, float] | None:
        ready = [self._ready(rank) for rank in range(self.placement.ranks)]
        left = [
            sum(sum(seconds[stage]) for seconds in self.seconds if seconds for stage in own)
            for own in self.own
        ]
        for _ in range((3 if self.rule.split else 2) * self.placement.stages * self.microbatches):
            # Starts never decrease: what arrives before the earliest of them has been sent already.
            earliest = min(ready)
            rank = ready.index(earliest)
            begin, kind, stage = earliest
            if begin == _INFINITE:
                raise MtMegatronError(f"rule '{self.rule}': the ranks wait for each other for ever")
            if begin + left[rank] >= below:
                return None
            left[rank] -= self.seconds[kind][stage][self.done[kind][stage]]
            for changed in self._start(rank, begin, kind, stage):
                ready[changed] = self._ready(changed)
        actions = tuple(tuple(each) for each in self.actions)
        seconds = max(self.free)
        if seconds >= below:
            return None
        return Schedule(name, self.placement, self.microbatches, actions), seconds

    def _ready(self, rank: int) -> tuple[float, int, int]:
        """When ``rank`` can start its next action, and which: kind and stage."""
        now = self.free[rank]
        backward, forward, weight = self.done
        backward_arrived, forward_arrived = self.arrived
        backward_latest, forward_latest = self.latest
        found: list[_Found] = []
        for stage in self._open(rank, _BACKWARD):
            index = backward[stage]
            if index < forward[stage] and (time := backward_arrived[stage][index]) < _INFINITE:
                found.append((time if time > now else now, backward_latest[stage][index], _BACKWARD, stage))
        waiting = _LAST
        for stage in self._open(rank, _FORWARD):
            index = forward[stage]
            if index == self.microbatches or (time := forward_arrived[stage][index]) == _INFINITE:
                continue
            if self._fits(rank, stage, index):
                found.append((time if time > now else now, forward_latest[stage][index], _FORWARD, stage))
            elif time <= now:
                waiting = min(waiting, forward_latest[stage][index])
        if self.rule.split:
            for stage in self.own[rank]:
                if weight[stage] < backward[stage]:
                    found.append((now, waiting, _WEIGHT, stage))
        if not found:
            return _INFINITE, 0, 0
        time, first, kind, stage = min(found)
        limit = time + self.rule.patience * self.seconds[kind][stage][self.done[kind][stage]]
        for each in found:
            if each[1] < first and each[0] <= limit:
                time, first, kind, stage = each
        return time, kind, stage

    def _open(self, rank: int, kind: int) -> Sequence[int]:
        """Stages of which ``rank`` may run an action of ``kind`` next."""
        own = self.own[rank]
        if not self.order:
            return own
        done = self.count[kind][rank]
        if done == len(self.order):
            return ()
        chunk = self.order[done]
        return (own[chunk if kind == _FORWARD else -1 - chunk],)

    def _fits(self, rank: int, stage: int, index: int) -> bool:
        """True where the F may start without a rank that waits for ever later on."""
        room, size, own = self.room[rank], self.size, self.own[rank]
        if room == _INFINITE:
            return True
        need = self.held[rank] + size[stage][index]
        oldest = self.oldest[rank]
        if not self.order and index > oldest:
            forward = self.done[_FORWARD]
            need += sum(size[each][oldest] for each in own if forward[each] <= oldest)
        if need > room or self.order or index <= oldest + 1:
            return need <= room
        return self.younger[rank] + size[stage][index] + self.whole[rank] <= room

    def _start(self, rank: int, begin: float, kind: int, stage: int) -> tuple[int, ...]:
        """Lay out the next action of ``kind`` of ``stage``; the ranks whose next action may change."""
        index = self.done[kind][stage]
        self.done[kind][stage] += 1
        self.count[kind][rank] += 1
        end = self.free[rank] = begin + self.seconds[kind][stage][index]
        self.actions[rank].append(Action(_KINDS[kind], stage, index))
        size = self.size[stage][index]
        to = stage + 1 if kind == _FORWARD else stage - 1
        if kind == _FORWARD:
            self._hold(rank, index, size)
            if to == self.placement.stages:
                self.arrived[_BACKWARD][stage][index] = end
                return (rank,)
        else:
            self._hold(rank, index, -size * (self.kept if kind == _WEIGHT else 1.0 - self.kept))
            if index == self.oldest[rank]:
                self._complete(rank)
            if kind == _WEIGHT or to < 0:
                return (rank,)
        other = self.rank[to]
        self.arrived[kind][to][index] = self._arrival((rank, other), min(stage, to), index, end)
        return (rank,) if other == rank else (rank, other)

    def _arrival(self, edge: tuple[int, int], stage: int, index: int, end: float) -> float:
        """When the output of ``stage``, or the gradient that comes back for it, has arrived."""
        if edge[0] == edge[1]:
            return end
        wire = self.wire[edge]
        if wire is not None:
            end = max(end, self.wire_free.get(edge, 0.0)) + wire[stage][index]
            self.wire_free[edge] = end
        return end + self.lag[edge]

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
        whole: float = sum(sizes[max(first, backward) : forward])
        return whole + self.kept * sum(sizes[max(first, weight) : backward]) if self.rule.split else whole

    # -- what follows from the arguments

    def _room(self, costs: Costs, cap: Sequence[float] | None) -> list[float]:
        """Memory for activations of each rank."""
        if cap is None:
            return [_INFINITE] * self.placement.ranks
        if len(cap) != self.placement.ranks:
            raise ConfigError(f"found caps of {len(cap)} ranks; expected {self.placement.ranks}")
        static = per_stage(costs.static, self.placement.stages, 1, "static")
        found = []
        for rank, most in enumerate(cap):
            own = self.own[rank]
            copies = [self.rule.group or 1] * (len(own) - 1) + [1]
            room = float(most) - sum(float(static[stage, 0]) for stage in own)
            room += _ROUNDING * abs(room)
            need = sum(copy * max(self.size[stage]) for copy, stage in zip(copies, own, strict=True))
            if need > room:
                raise ConfigError(
                    f"rank {rank}: {len(own)} chunks with the rule '{self.rule}' need {need:g} of "
                    f"activations and the cap leaves {room:g}; raise the cap or shorten the micro-batches"
                )
            found.append(room)
        return found

    def _links(
        self, costs: Costs
    ) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], list[list[float]] | None]]:
        """Latency of each directed edge, and seconds that each stage's message takes its wire: None for
        none."""
        message = per_stage(costs.message, self.placement.stages, self.microbatches, "message")
        lag: dict[tuple[int, int], float] = {}
        wire: dict[tuple[int, int], list[list[float]] | None] = {}
        for one, other in zip(self.rank, self.rank[1:], strict=False):
            for edge in ((one, other), (other, one)):
                if one != other and edge not in lag:
                    link = costs.link_of(edge)
                    lag[edge] = link.latency
                    unlimited = math.isinf(link.bandwidth)
                    wire[edge] = None if unlimited else (message / link.bandwidth).tolist()
        return lag, wire

    def _latest_starts(self) -> tuple[list[list[float]], list[list[float]]]:
        """Latest start of each B and F, each [stages][micro-batches], in seconds before the end of the step,
        which is 0: what comes after it on the way of its micro-batch, messages included, and the
        micro-batches behind it, one every ``Rule.pace``. Times are means over micro-batches."""
        stages, count = self.placement.stages, self.microbatches
        backward, forward = (
            [sum(of_stage) / count for of_stage in self.seconds[kind]] for kind in (_BACKWARD, _FORWARD)
        )
        behind = self.rule.pace * max(sum(forward[stage] for stage in own) for own in self.own)
        paths: tuple[list[float], list[float]] = [0.0] * stages, [0.0] * stages
        path = sum(self.seconds[_WEIGHT][0]) / count if self.rule.split else 0.0
        for stage in range(stages):
            path += backward[stage] + (self._message(stage, stage - 1) if stage else 0.0)
            paths[_BACKWARD][stage] = path
        for stage in reversed(range(stages)):
            path += forward[stage] + (self._message(stage, stage + 1) if stage + 1 < stages else 0.0)
            paths[_FORWARD][stage] = path
        backwards, forwards = (
            [[-path - behind * (count - 1 - index) for index in range(count)] for path in of_kind]
            for of_kind in paths
        )
        return backwards, forwards

    def _message(self, stage: int, other: int) -> float:
        """Mean seconds of a message from one stage to the next one or the one before."""
        edge = self.rank[stage], self.rank[other]
        if edge[0] == edge[1]:
            return 0.0
        wire = self.wire[edge]
        return self.lag[edge] + (sum(wire[min(stage, other)]) / self.microbatches if wire else 0.0)


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
        backward - weight if costs.input is None else per_stage(costs.input, stages, microbatches, "input")
    )
    if inputs.min() < 0:
        raise ConfigError(
            f"found weight gradients of {costs.weight} s in a backward of {costs.backward} s; expected the "
            "part to be smaller than the whole"
        )
    return [inputs.tolist(), forward, weight.tolist()]
