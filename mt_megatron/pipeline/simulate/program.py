"""A schedule compiled once and timed many times.

The step is a graph of computations, transfers and reductions in which everything begins as soon as what it
waits for is over: a computation after the one before it on its rank and after its message has arrived; a
transfer after the computation that it sends and after the transfer before it on the same directed edge; a
reduction after the computation before it in the schedule and after the rank's reduction before it. Nothing in
the graph depends on times, so a timing is one pass over its nodes.

Not modelled: links that share a switch or an adapter, and computations slowed by transfers beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from ..actions import Action, Kind, Schedule, lowered, matching_send, transfer_out, transfers_in
from .costs import PERFECT, Costs, Edge, Floats, per_stage
from .timeline import Timeline

_TABLES = (Kind.F, Kind.B, "input", Kind.W)
"""Blocks of [stages x micro-batches] seconds, in the order of ``Program._seconds``."""


@dataclass
class _Node:
    """Something that takes time: what it is, what it waits for, and which of those travel over a link."""

    action: Action
    rank: int
    edge: int = -1
    """Of a transfer."""

    after: int = 0
    """Node that must be over: the rank's computation before, or the one that a transfer sends."""

    arrival: int = 0
    """Node that must be over, and have arrived if it is a transfer (computations), or the node before on the
    same edge (transfers) or among the rank's reductions."""

    arrival_edge: int = -1
    """Edge whose latency ``arrival`` has to be waited for; -1: none."""

    posted: int = 0
    """Computation that is over when the receive is posted (transfers, with rendezvous)."""


class Program:
    """``schedule`` ready to be timed. Thread-safe; its parts do not change.

    ``rendezvous``: a transfer begins no sooner than the RECV that takes it in has been posted (a schedule
    without RECVs is ``lowered`` first) and the receiver's word of it has travelled back; otherwise a receiver
    always has room. ``reduce_early``: where the schedule names no REDUCE, reductions begin after a stage's
    last gradients, otherwise after the rank's last computation. Raises ConfigError where ranks wait for each
    other for ever or a computation comes before one that it needs; ``validate`` says more.
    """

    def __init__(self, schedule: Schedule, *, rendezvous: bool = False, reduce_early: bool = True) -> None:
        self.schedule = schedule
        self.rendezvous = rendezvous
        if rendezvous and not schedule.is_lowered:
            schedule = lowered(schedule, reduce_early=reduce_early)
        self.edges: tuple[Edge, ...] = ()
        nodes = self._nodes(schedule, reduce_early)
        order = _topological(nodes)
        place = np.empty(len(nodes), dtype=np.int64)
        place[order] = np.arange(len(nodes))
        ordered = [nodes[index] for index in order]
        self.actions: tuple[Action, ...] = tuple(node.action for node in ordered)
        """Of each node; the first is the step's start and takes no time."""
        self.ranks = np.array([node.rank for node in ordered])
        """Of each node; of a transfer the sender."""
        self.node_edges = np.array([node.edge for node in ordered])
        """Of each node: index in ``edges``, -1 where it is no transfer."""
        self.after = place[[node.after for node in ordered]]
        self.arrival = place[[node.arrival for node in ordered]]
        self.arrival_edge = np.array([node.arrival_edge for node in ordered])
        self._posted = place[[node.posted for node in ordered]]
        self.node_of = {action: index for index, action in enumerate(self.actions) if index}
        """Node of each computation, SEND and REDUCE."""
        self._after: list[int] = self.after.tolist()[1:]
        self._arrival: list[int] = self.arrival.tolist()[1:]
        self._index_durations()
        self._windows: dict[tuple[int | None, ...], npt.NDArray[np.int64]] = {}

    # -- the graph

    def _nodes(self, schedule: Schedule, reduce_early: bool) -> list[_Node]:
        placement = schedule.placement
        edges: dict[Edge, int] = {}
        nodes = [_Node(Action(Kind.F, -1, -1), -1)]
        computed: dict[Action, int] = {}
        sends: dict[Action, int] = {}
        receives: list[tuple[int, Action]] = []
        posted: dict[Action, int] = {}
        for rank, actions in enumerate(schedule.ranks):
            previous = reduced = 0
            on_edge: dict[int, int] = defaultdict(int)
            last = {a.stage: i for i, a in enumerate(actions) if a.kind in (Kind.B, Kind.W)}
            for index, action in enumerate(actions):
                if action.kind.computes:
                    _check_local(schedule, rank, action, computed)
                    nodes.append(_Node(action, rank, after=previous))
                    previous = computed[action] = len(nodes) - 1
                    if (receive := transfers_in(placement, action)) is not None:
                        receives.append((previous, receive))
                    send = None if schedule.is_lowered else transfer_out(placement, action)
                    if send is not None and schedule.forward_only and send.kind is Kind.SEND_B:
                        send = None
                elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                    posted[matching_send(action)] = previous
                    continue
                else:
                    send = action if action.kind is not Kind.REDUCE else None
                if send is not None:
                    forward = send.kind is Kind.SEND_F
                    to = placement.rank(send.stage + 1 if forward else send.stage - 1)
                    edge = edges.setdefault((rank, to), len(edges))
                    nodes.append(_Node(send, rank, edge, previous, on_edge[edge]))
                    on_edge[edge] = sends[send] = len(nodes) - 1
                reduces = action.kind is Kind.REDUCE or (
                    reduce_early and not schedule.is_lowered and last.get(action.stage) == index
                )
                if reduces:
                    nodes.append(_Node(Action(Kind.REDUCE, action.stage, -1), rank, -1, previous, reduced))
                    reduced = len(nodes) - 1
            if not reduce_early and not schedule.is_lowered:
                for stage in (stage for stage in placement.stages_of(rank) if stage in last):
                    nodes.append(_Node(Action(Kind.REDUCE, stage, -1), rank, -1, previous, reduced))
                    reduced = len(nodes) - 1
        for node, receive in receives:
            send = matching_send(receive)
            if send not in sends:
                raise ConfigError(
                    f"rank {nodes[node].rank}: {nodes[node].action} waits for {send}, never sent"
                )
            nodes[node].arrival, nodes[node].arrival_edge = sends[send], nodes[sends[send]].edge
            if self.rendezvous:
                nodes[sends[send]].posted = posted.get(send, 0)
        self.edges = tuple(edges)
        return nodes

    def _index_durations(self) -> None:
        """Where the duration of each node stands in the table of ``_seconds``."""
        stages, microbatches = self.schedule.placement.stages, self.schedule.microbatches
        split, block = self.schedule.splits_backward, stages * microbatches
        self._transfers = np.flatnonzero(self.node_edges >= 0)
        self._transfer_edges = self.node_edges[self._transfers]
        where = np.zeros(len(self.actions), dtype=np.int64)
        messages = np.zeros(len(self.actions), dtype=np.int64)
        for index, action in enumerate(self.actions):
            if index == 0:
                continue
            at = action.stage * microbatches + action.microbatch
            if action.kind.computes:
                row = 2 if (action.stage, action.microbatch) in split else 1
                block_of = {Kind.F: 0, Kind.B: row, Kind.W: 3}[action.kind]
                where[index] = block_of * block + at
            elif action.kind is Kind.REDUCE:
                where[index] = 4 * block + action.stage
            else:
                messages[index] = at - (microbatches if action.kind is Kind.SEND_B else 0)
        self._where, self._messages = where, messages[self._transfers]
        self._computes = np.array([a.kind.computes for a in self.actions])
        self._computes[0] = False
        self._has_split = bool(split)
        self._edge_index = {edge: index for index, edge in enumerate(self.edges)}

    # -- timing

    def makespan(self, costs: Costs) -> float:
        """Seconds of the step, reductions included."""
        return max(self._ends(*self._prepared(costs)))

    def makespans(self, costs: Sequence[Costs]) -> Floats:
        """Seconds of the step for each of ``costs``, [costs]; faster than one by one from about ten on."""
        made = np.empty(len(costs))
        groups: dict[tuple[int | None, ...], list[int]] = defaultdict(list)
        for index, each in enumerate(costs):
            groups[tuple(each.link_of(edge).window for edge in self.edges)].append(index)
        for group in groups.values():
            made[group] = self._many([costs[index] for index in group])
        return made

    def run(self, costs: Costs) -> Timeline:
        """When everything begins and ends."""
        durations, latencies, windows = self._prepared(costs)
        ends = np.array(self._ends(durations, latencies, windows))
        lags = np.append(latencies, 0.0)
        return Timeline(
            program=self,
            costs=costs,
            durations=durations,
            ends=ends,
            lags=lags[self.arrival_edge],
            others=[(preds, lags[edges]) for preds, edges in self._others(windows)],
            latencies=latencies,
        )

    def edge_costs(self, costs: Costs) -> dict[Edge, float]:
        """Seconds by which the step would be shorter if one directed edge had neither latency nor a limit of
        bandwidth, the others being as they are."""
        freed = [replace(costs, links={**costs.links, edge: PERFECT}) for edge in self.edges]
        seconds = self.makespans([costs, *freed]).tolist()
        return {edge: seconds[0] - each for edge, each in zip(self.edges, seconds[1:], strict=True)}

    def _prepared(self, costs: Costs) -> tuple[Floats, Floats, tuple[int | None, ...]]:
        """Seconds of each node, latency of each edge, window of each edge."""
        links = [costs.link_of(edge) for edge in self.edges]
        durations = self._seconds(costs)[self._where]
        durations[0] = 0.0
        stages, microbatches = self.schedule.placement.stages, self.schedule.microbatches
        size = per_stage(costs.message, stages, microbatches, "message")
        per_byte = np.array([1.0 / link.bandwidth for link in links])
        durations[self._transfers] = size.ravel()[self._messages] * per_byte[self._transfer_edges]
        latencies = np.array([link.latency for link in links])
        return durations, latencies, tuple(link.window for link in links)

    def _seconds(self, costs: Costs) -> Floats:
        """Tables of F, whole B, B of input gradients alone, W and reductions, one after another."""
        stages, microbatches = self.schedule.placement.stages, self.schedule.microbatches
        forward = per_stage(costs.forward, stages, microbatches, "forward")
        whole = per_stage(costs.backward, stages, microbatches, "backward")
        inputs = weights = whole
        if self._has_split:
            if costs.weight is None:
                raise ConfigError(
                    f"schedule {self.schedule.name} splits the backward, and the costs name no time of its "
                    "weight gradients; give Costs(weight=...)"
                )
            weights = per_stage(costs.weight, stages, microbatches, "weight")
            inputs = (
                whole - weights
                if costs.input is None
                else per_stage(costs.input, stages, microbatches, "input")
            )
            if inputs.min() < 0:
                raise ConfigError(
                    f"found weight gradients of {costs.weight} s in a backward of {costs.backward} s; "
                    "expected the part to be smaller than the whole"
                )
        reduction = per_stage(costs.reduction, stages, 1, "reduction")
        return np.concatenate([each.ravel() for each in (forward, whole, inputs, weights, reduction)])

    def _others(
        self, windows: tuple[int | None, ...]
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Further nodes that transfers wait for, with the edge whose latency comes on top (-1: none)."""
        found = []
        if any(window is not None for window in windows):
            if windows not in self._windows:
                before = np.zeros(len(self.actions), dtype=np.int64)
                for edge, window in enumerate(windows):
                    on_edge = self._transfers[self._transfer_edges == edge]
                    if window is not None:
                        before[on_edge[window:]] = on_edge[: len(on_edge) - window]
                self._windows[windows] = before
            before = self._windows[windows]
            found.append((before, np.where(before > 0, self.node_edges, -1)))
        if self.rendezvous:
            found.append((self._posted, np.where(self._posted > 0, self.node_edges, -1)))
        return found

    def _ends(self, durations: Floats, latencies: Floats, windows: tuple[int | None, ...]) -> list[float]:
        """Seconds from the step's start to each node's end."""
        lags = np.append(latencies, 0.0)
        ends = [0.0]
        append = ends.append
        plain = zip(
            self._after,
            self._arrival,
            lags[self.arrival_edge][1:].tolist(),
            durations[1:].tolist(),
            strict=True,
        )
        others = self._others(windows)
        if not others:
            for after, arrival, lag, duration in plain:
                begin, arrived = ends[after], ends[arrival] + lag
                append((arrived if arrived > begin else begin) + duration)
            return ends
        columns = [(preds[1:].tolist(), lags[edges][1:].tolist()) for preds, edges in others]
        first, second = columns[0], columns[1] if len(columns) > 1 else (repeat(0), repeat(0.0))
        for (after, arrival, lag, duration), one, one_lag, two, two_lag in zip(
            plain, *first, *second, strict=False
        ):
            append(max(ends[after], ends[arrival] + lag, ends[one] + one_lag, ends[two] + two_lag) + duration)
        return ends

    def _many(self, costs: Sequence[Costs]) -> Floats:
        prepared = [self._prepared(each) for each in costs]
        durations = np.stack([each[0] for each in prepared], axis=1)
        lags = np.stack([np.append(each[1], 0.0) for each in prepared], axis=1)
        ends = np.zeros_like(durations)
        others = [(preds.tolist(), edges.tolist()) for preds, edges in self._others(prepared[0][2])]
        arrival_edge = self.arrival_edge.tolist()
        for index in range(1, len(self.actions)):
            end = ends[index]
            np.add(ends[self._arrival[index - 1]], lags[arrival_edge[index]], out=end)
            np.maximum(end, ends[self._after[index - 1]], out=end)
            for preds, edges in others:
                if preds[index]:
                    np.maximum(end, ends[preds[index]] + lags[edges[index]], out=end)
            end += durations[index]
        made: Floats = ends.max(axis=0)
        return made


def _check_local(schedule: Schedule, rank: int, action: Action, computed: dict[Action, int]) -> None:
    """Raise unless what ``action`` needs of its own rank came before it."""
    kind, stage, microbatch = action
    if kind is Kind.F:
        needs = [Action(Kind.F, stage - 1, microbatch)] if stage > 0 else []
    elif kind is Kind.B:
        needs = [Action(Kind.F, stage, microbatch)]
        if stage < schedule.placement.stages - 1:
            needs.append(Action(Kind.B, stage + 1, microbatch))
    else:
        needs = [Action(Kind.B, stage, microbatch)]
    for need in needs:
        if schedule.placement.rank(need.stage) == rank and need not in computed:
            raise ConfigError(f"rank {rank} of schedule {schedule.name}: {action} comes before {need}")


def _topological(nodes: list[_Node]) -> npt.NDArray[np.int64]:
    """Indices of ``nodes`` so that each comes after those that it waits for, the start first."""
    followers: list[list[int]] = [[] for _ in nodes]
    waits = [0] * len(nodes)
    for index, node in enumerate(nodes):
        if index:
            for other in {node.after, node.arrival, node.posted}:
                followers[other].append(index)
                waits[index] += 1
    order, ready = [], [0]
    while ready:
        index = ready.pop()
        order.append(index)
        for follower in followers[index]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    if len(order) < len(nodes):
        stuck = min(index for index, left in enumerate(waits) if left)
        raise ConfigError(
            f"the ranks wait for each other for ever: {len(nodes) - len(order)} actions never begin, "
            f"among them {nodes[stuck].action} on rank {nodes[stuck].rank}"
        )
    return np.array(order)
