"""Exchange of measured times between ranks: one vector of integers, summed over all ranks.

Each rank writes into places of its own, so the sum is a collection of what all of them know, equal to the
bit on every rank. Times are nanoseconds on the clock of the rank that wrote them. Clocks of two ranks
differ, so the delay of a link is half of a round trip: what a message took from one rank's clock to the
other's, and a message back, added; the difference between the clocks falls out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from ..actions import Action, Kind, Schedule, matching_receive, transfer_out
from ..execute.step_times import RankTimes
from ..simulate.costs import Costs, Edge
from ..simulate.program import Program
from .situation import EdgeTime, Measured

WATCHED = 3
"""Messages of each directed edge whose times are told: the first, the last, and the one that its receiver is
predicted to wait for longest."""

_PER_STAGE = 5
"""Of a stage: times of F, whole B, B without weight gradients and W, and bytes of an activation."""

_PER_RANK = 3
"""Of a rank: the step, bytes held at most, and bytes that its device has."""


@dataclass(frozen=True)
class Watched:
    """Messages of a schedule that are looked at."""

    edges: tuple[Edge, ...]
    sends: Mapping[Edge, tuple[tuple[int, Action], ...]]
    """Place among the edge's messages, and the SEND; up to ``WATCHED`` of each edge, in order."""


def watched(program: Program, costs: Costs) -> Watched:
    """The messages to look at under a schedule. Equal on all ranks."""
    by_edge: dict[Edge, list[tuple[float, float, Action]]] = {}
    for transfer in program.run(costs).transfers:
        by_edge.setdefault(transfer.edge, []).append((transfer.begin, transfer.stalls, transfer.action))
    places = _places(program.schedule)
    chosen = {}
    for edge, found in by_edge.items():
        longest = max(range(len(found)), key=lambda index: (found[index][1], -index))
        sends = [found[index][2] for index in sorted({0, longest, len(found) - 1})]
        chosen[edge] = tuple((places[send], send) for send in sends)
    return Watched(tuple(sorted(chosen)), chosen)


def _places(schedule: Schedule) -> dict[Action, int]:
    """Place of each SEND among those of its directed edge, in the order in which its sender computes what
    they carry."""
    placement = schedule.placement
    found: dict[Action, int] = {}
    for actions in schedule.ranks:
        counts = [0] * placement.ranks
        for action in actions:
            send = transfer_out(placement, action) if action.kind.computes else None
            if send is not None:
                to = placement.rank(send.stage + (1 if send.kind is Kind.SEND_F else -1))
                found[send] = counts[to]
                counts[to] += 1
    return found


class Vector:
    """Places in which each rank writes what it knows: for each pipeline and rank its stages' times, the step
    and memory; for each edge the times of its watched messages. 0 stands for what is not known."""

    def __init__(self, schedule: Schedule, watch: Watched, pipelines: int) -> None:
        self._schedule, self._watch, self._pipelines = schedule, watch, pipelines
        placement = schedule.placement
        self._per_rank = placement.chunks * _PER_STAGE + _PER_RANK
        self._edges_at = placement.ranks * self._per_rank
        self._per_pipeline = self._edges_at + len(watch.edges) * WATCHED * 2

    def __len__(self) -> int:
        return self._pipelines * self._per_pipeline

    def pack(self, times: RankTimes | None, rank: int, pipeline: int) -> list[int]:
        """What ``rank`` of ``pipeline`` knows; zeros for None."""
        made = [0] * len(self)
        if times is None:
            return made
        first = pipeline * self._per_pipeline
        at = first + rank * self._per_rank
        for stage in self._schedule.placement.stages_of(rank):
            for value in (*self._means(times, stage), times.kept.get(stage, 0)):
                made[at] = value
                at += 1
        made[at : at + _PER_RANK] = times.seconds, times.memory or 0, times.capacity or 0
        for number, edge in enumerate(self._watch.edges):
            at = first + self._edges_at + number * WATCHED * 2
            for _, send in self._watch.sends[edge]:
                # One more than the time: 0 stands for what is not known.
                if edge[0] == rank and send in times.sent:
                    made[at] = times.sent[send] + 1
                if edge[1] == rank and (receive := matching_receive(send)) in times.arrived:
                    made[at + 1] = times.arrived[receive] + 1
                at += 2
        return made

    def _means(self, times: RankTimes, stage: int) -> list[int]:
        """Mean times of F, whole B, B without weight gradients, and W; 0 where there is none."""
        kinds: list[list[int]] = [[], [], [], []]
        for action, taken in times.computed.items():
            if action.stage == stage:
                split = (stage, action.microbatch) in self._schedule.splits_backward
                kinds[{Kind.F: 0, Kind.B: 2 if split else 1, Kind.W: 3}[action.kind]].append(taken)
        return [max(1, round(mean(each))) if each else 0 for each in kinds]

    def unpack(self, summed: Sequence[int], step: int) -> Measured | None:
        """The step as all ranks know it, of several pipelines the slowest in everything; None where a rank
        said nothing."""
        found = [self._pipeline(summed, pipeline, step) for pipeline in range(self._pipelines)]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        edges: dict[Edge, EdgeTime] = {}
        for each in known:
            for edge, time in each.edges.items():
                if edge not in edges or time.delay > edges[edge].delay:
                    edges[edge] = time
        return Measured(
            step=step,
            seconds=max(each.seconds for each in known),
            forward=_largest([each.forward for each in known]),
            backward=_largest([each.backward or () for each in known]),
            input=_largest([each.input or () for each in known]),
            weight=_largest([each.weight or () for each in known]),
            edges=edges,
            memory=_largest([each.memory for each in known if each.memory is not None]) or None,
            activation=_largest([each.activation for each in known if each.activation is not None]) or None,
            capacity=_smallest([each.capacity for each in known if each.capacity is not None]) or None,
        )

    def _pipeline(self, summed: Sequence[int], pipeline: int, step: int) -> Measured | None:
        placement = self._schedule.placement
        of_stage = [[math.nan] * placement.stages for _ in range(_PER_STAGE)]
        first = pipeline * self._per_pipeline
        of_rank = []
        for rank in range(placement.ranks):
            at = first + rank * self._per_rank
            for stage in placement.stages_of(rank):
                for each in of_stage:
                    if summed[at]:
                        each[stage] = float(summed[at])
                    at += 1
            of_rank.append([float(value) for value in summed[at : at + _PER_RANK]])
        seconds, memory, capacity = zip(*of_rank, strict=True)
        if not all(seconds):
            return None
        forward, backward, inputs, weight = ([value / 1e9 for value in each] for each in of_stage[:4])
        tells_memory = all(memory) and all(capacity) and not any(map(math.isnan, of_stage[4]))
        return Measured(
            step=step,
            seconds=max(seconds) / 1e9,
            forward=forward,
            backward=backward,
            input=inputs,
            weight=weight,
            edges=self._delays(summed, first),
            memory=memory if tells_memory else None,
            activation=of_stage[4] if tells_memory else None,
            capacity=capacity if tells_memory else None,
        )

    def _delays(self, summed: Sequence[int], first: int) -> dict[Edge, EdgeTime]:
        """Half of the round trip of each pair of ranks, for both directions."""
        one_way: dict[Edge, tuple[float, float]] = {}
        for number, edge in enumerate(self._watch.edges):
            at = first + self._edges_at + number * WATCHED * 2
            seen = []
            for place, _ in self._watch.sends[edge]:
                if summed[at] and summed[at + 1]:
                    seen.append((place, (summed[at + 1] - summed[at]) / 1e9, summed[at + 1] / 1e9))
                at += 2
            if seen:
                one_way[edge] = min(taken for _, taken, _ in seen), _wire(seen)
        found = {}
        for (one, other), (there, wire) in one_way.items():
            back = one_way.get((other, one))
            if back is not None:
                delay = max(0.0, (there + back[0]) / 2)
                found[one, other] = EdgeTime(delay=delay, wire=min(delay, wire))
        return found


def _wire(seen: Sequence[tuple[int, float, float]]) -> float:
    """Seconds of one message on the wire, from messages that queued: the first and the last of ``seen``
    (place, seconds from clock to clock, arrival). 0 where the later one took no longer."""
    (place, taken, arrived), (last, taken_last, arrived_last) = seen[0], seen[-1]
    if last == place or taken_last <= taken:
        return 0.0
    queued = taken_last - taken
    each = (arrived_last - arrived) / (last - place)
    # What queued must be seen to grow with the messages before it; a single late one is no queue.
    return each if queued >= each else 0.0


def _largest(values: Sequence[Sequence[float]]) -> list[float]:
    """The largest of each place; NaN where none is known."""
    found = []
    for each in zip(*values, strict=True):
        known = [value for value in each if not math.isnan(value)]
        found.append(max(known) if known else math.nan)
    return found


def _smallest(values: Sequence[Sequence[float]]) -> list[float]:
    return [min(each) for each in zip(*values, strict=True)]
