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
from dataclasses import replace
from functools import cached_property
from itertools import repeat

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from ..actions import KINDS, REDUCE, SEND_B, Action, B, Call, F, Schedule, W
from ..lowering import lowered
from .costs import PERFECT, Costs, Edge, Floats, per_stage
from .graph import nodes_of
from .timeline import Timeline


class Program:
    """``schedule`` ready to be timed. Thread-safe; its parts do not change.

    ``rendezvous``: a transfer begins no sooner than the RECV that takes it in has been posted (a schedule
    without RECVs is ``lowered`` first) and the receiver's word of it has travelled back; otherwise a receiver
    always has room. ``calls``: what the ranks do where transfers are blocking exchanges (``upstream_calls``),
    each over when its messages have been sent and have arrived. ``reduce_early``: where no REDUCE is named,
    reductions begin after a stage's last gradients, otherwise after the rank's last computation. Without
    ``links`` messages take no time whatever the costs say, and timing takes half as long. Raises
    ConfigError where ranks wait for each other for ever or a computation comes before one that it needs;
    ``validate`` says more.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        rendezvous: bool = False,
        reduce_early: bool = True,
        calls: Sequence[Sequence[Call]] | None = None,
        links: bool = True,
    ) -> None:
        self.schedule = schedule
        self.rendezvous = rendezvous or calls is not None
        self.blocking = calls is not None
        if calls is None and rendezvous and not schedule.is_lowered:
            schedule = lowered(schedule, reduce_early=reduce_early)
        nodes = nodes_of(schedule, calls, rendezvous=self.rendezvous, reduce_early=reduce_early, links=links)
        self.edges: tuple[Edge, ...] = nodes.pairs
        self.kinds = nodes.kinds
        """Of each node, its place in ``KINDS``."""
        self.stages, self.microbatches = nodes.stages, nodes.microbatches
        """Of each node."""
        self.ranks = nodes.ranks
        """Of each node; of a transfer the sender."""
        self.node_edges = nodes.edges
        """Of each node: index in ``edges``, -1 where it is no transfer."""
        self.after, self.arrival = nodes.after, nodes.arrival
        self.arrival_edge = nodes.arrival_edges
        self.posted = nodes.posted
        self._waits = nodes.waits
        self._after: list[int] = self.after.tolist()[1:]
        self._arrival: list[int] = self.arrival.tolist()[1:]
        self._index_durations()
        self._windows: dict[tuple[int | None, ...], npt.NDArray[np.int64]] = {}

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """Of each node; the first is the step's start and takes no time."""
        kinds = map(KINDS.__getitem__, self.kinds.tolist())
        return tuple(map(Action, kinds, self.stages.tolist(), self.microbatches.tolist()))

    @cached_property
    def node_of(self) -> dict[Action, int]:
        """Node of each computation, SEND and REDUCE."""
        waits = self._waits.tolist()
        return {a: index for index, a in enumerate(self.actions) if index and not waits[index]}

    def _index_durations(self) -> None:
        """Where the duration of each node stands in the table of ``_seconds``."""
        stages, microbatches = self.schedule.placement.stages, self.schedule.microbatches
        block, kinds, own = stages * microbatches, self.kinds, ~self._waits
        own[0] = False
        at = self.stages.astype(np.int64) * microbatches + self.microbatches
        split = self.schedule.split_table
        where = np.full(len(kinds), 4 * block + stages)
        for kind, number in ((F, 0), (B, 1), (W, 3)):
            found = own & (kinds == kind)
            where[found] = number * block + at[found]
        halved = own & (kinds == B)
        halved[halved] = split[self.stages[halved], self.microbatches[halved]]
        where[halved] += block
        reduces = own & (kinds == REDUCE)
        where[reduces] = 4 * block + self.stages[reduces]
        self._transfers = np.flatnonzero(self.node_edges >= 0)
        self._transfer_edges = self.node_edges[self._transfers]
        back = kinds[self._transfers] == SEND_B
        self._where, self._messages = where, at[self._transfers] - microbatches * back
        self._computes: npt.NDArray[np.bool_] = kinds <= W
        self._computes[0] = False
        self._has_split = bool(split.any())

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
        durations, lags, windows = self._prepared(costs)
        ends = np.array(self._ends(durations, lags, windows))
        return Timeline(
            program=self,
            costs=costs,
            durations=durations,
            ends=ends,
            lags=lags[self.arrival_edge],
            others=[(preds, lags[edges]) for preds, edges in self._others(windows)],
            latencies=lags[: len(self.edges)],
        )

    def edge_costs(self, costs: Costs) -> dict[Edge, float]:
        """Seconds by which the step would be shorter if one directed edge had neither latency nor a limit of
        bandwidth, the others being as they are."""
        freed = [replace(costs, links={**costs.links, edge: PERFECT}) for edge in self.edges]
        seconds = self.makespans([costs, *freed]).tolist()
        return {edge: seconds[0] - each for edge, each in zip(self.edges, seconds[1:], strict=True)}

    def _prepared(self, costs: Costs) -> tuple[Floats, Floats, tuple[int | None, ...]]:
        """Seconds of each node; latencies: of each edge, of each in the other direction, and a zero; window
        of each edge."""
        links = [costs.link_of(edge) for edge in self.edges]
        durations = self._seconds(costs)[self._where]
        stages, microbatches = self.schedule.placement.stages, self.schedule.microbatches
        size = per_stage(costs.message, stages, microbatches, "message")
        per_byte = np.array([1.0 / link.bandwidth for link in links])
        durations[self._transfers] = size.ravel()[self._messages] * per_byte[self._transfer_edges]
        back = [costs.link_of((target, source)).latency for source, target in self.edges]
        lags = np.array([*(link.latency for link in links), *back, 0.0])
        return durations, lags, tuple(link.window for link in links)

    def _seconds(self, costs: Costs) -> Floats:
        """Tables of F, whole B, B of input gradients alone, W, reductions, and a zero, one after another."""
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
        tables = (forward, whole, inputs, weights, reduction, np.zeros(1))
        return np.concatenate([each.ravel() for each in tables])

    def _others(
        self, windows: tuple[int | None, ...]
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Further nodes that transfers wait for, with the place of the latency that comes on top (-1: none):
        a receiver's word that it has room travels in the other direction."""
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
            back = np.where(self.node_edges >= 0, len(self.edges) + self.node_edges, -1)
            found.append((self.posted, back))
        return found

    def _ends(self, durations: Floats, lags: Floats, windows: tuple[int | None, ...]) -> list[float]:
        """Seconds from the step's start to each node's end."""
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
        lags = np.stack([each[1] for each in prepared], axis=1)
        ends = np.zeros_like(durations)
        others = [(preds.tolist(), edges.tolist()) for preds, edges in self._others(prepared[0][2])]
        arrival_edge = self.arrival_edge.tolist()
        for index in range(1, len(self.actions)):
            end = ends[index]
            np.add(ends[self._arrival[index - 1]], lags[arrival_edge[index]], out=end)
            np.maximum(end, ends[self._after[index - 1]], out=end)
            for preds, edges in others:
                if preds[index] or edges[index] >= 0:
                    np.maximum(end, ends[preds[index]] + lags[edges[index]], out=end)
            end += durations[index]
        made: Floats = ends.max(axis=0)
        return made
