"""Begin and end of everything in a simulated step, and what follows from them.

Times are in seconds from the step's start, sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..actions import Action, Kind
from .costs import Costs, Edge, Floats, per_stage
from .memory import memory_peaks

if TYPE_CHECKING:
    from .program import Program


@dataclass(frozen=True)
class Span:
    """One action of one rank."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Transfer:
    """One message."""

    action: Action
    """Its SEND."""

    edge: Edge
    bytes: float
    ready: float
    """End of the computation whose result it is."""

    begin: float
    sent: float
    """When its last byte has left."""

    arrived: float
    free: float
    """When the receiving rank has done what comes before the computation that needs the message: it waits
    from here on until ``arrived``."""

    slack: float
    """Seconds by which it alone may arrive later without a longer step."""

    @property
    def window(self) -> float:
        """Seconds that it may take from ``ready`` without the receiving rank waiting for it; 0 where that
        rank waits before it is ready."""
        return max(0.0, self.free - self.ready)

    @property
    def stalls(self) -> float:
        """Seconds that the receiving rank waits for it."""
        return max(0.0, self.arrived - self.free)


@dataclass(frozen=True)
class Reduction:
    """The data-parallel reduction of one stage's gradients."""

    stage: int
    rank: int
    ready: float
    """When the gradients are there."""

    begin: float
    end: float
    slack: float
    """Seconds by which it alone may end later without a longer step."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated step. Arrays are by node of ``program``."""

    program: Program
    costs: Costs
    durations: Floats
    ends: Floats
    lags: Floats
    """Latency on top of the end of ``program.arrival``."""

    others: list[tuple[npt.NDArray[np.int64], Floats]]
    """Further nodes that are waited for (window, rendezvous), with the latency on top of their end."""

    latencies: Floats
    """Of each of ``program.edges``."""

    @cached_property
    def begins(self) -> Floats:
        found: Floats = np.maximum(self.ends[self.program.after], self.ends[self.program.arrival] + self.lags)
        for preds, lags in self.others:
            found = np.maximum(found, self.ends[preds] + lags)
        return found

    @property
    def makespan(self) -> float:
        """Seconds of the step, reductions included."""
        return float(self.ends.max())

    @cached_property
    def busy(self) -> Floats:
        """Seconds that each rank computes, [ranks]."""
        computes = self.program._computes
        seconds: Floats = np.zeros(self.program.schedule.placement.ranks)
        np.add.at(seconds, self.program.ranks[computes], self.durations[computes])
        return seconds

    @property
    def idle(self) -> Floats:
        """Seconds of the step in which each rank computes nothing, [ranks]."""
        idle: Floats = self.makespan - self.busy
        return idle

    @property
    def bubble(self) -> float:
        """Part of the ranks' time in which they compute nothing."""
        return float(self.idle.mean() / self.makespan) if self.makespan else 0.0

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Computations of each rank in their order."""
        program, begins = self.program, self.begins
        made = []
        for actions in program.schedule.ranks:
            nodes = [program.node_of[action] for action in actions if action.kind.computes]
            made.append(
                tuple(
                    Span(program.actions[node], float(begins[node]), float(self.ends[node])) for node in nodes
                )
            )
        return tuple(made)

    @cached_property
    def slack(self) -> Floats:
        """Seconds by which each node alone may end later without a longer step, [nodes]."""
        program, makespan = self.program, self.makespan
        latest = np.full(len(self.ends), makespan)
        after, arrival = program.after.tolist(), program.arrival.tolist()
        lags, durations = self.lags.tolist(), self.durations.tolist()
        others = [(preds.tolist(), lag.tolist()) for preds, lag in self.others]
        late = latest.tolist()
        for node in range(len(late) - 1, 0, -1):
            begin = late[node] - durations[node]
            late[after[node]] = min(late[after[node]], begin)
            late[arrival[node]] = min(late[arrival[node]], begin - lags[node])
            for preds, lag in others:
                late[preds[node]] = min(late[preds[node]], begin - lag[node])
        return np.asarray(late) - self.ends

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every message between ranks, by its begin."""
        program, begins, slack = self.program, self.begins, self.slack
        schedule = program.schedule
        stages, microbatches = schedule.placement.stages, schedule.microbatches
        sizes = per_stage(self.costs.message, stages, microbatches, "message").ravel()
        taking = np.flatnonzero(program._computes & (program.arrival_edge >= 0))
        takers = dict(zip(program.arrival[taking].tolist(), taking.tolist(), strict=True))
        nodes, edges = program._transfers, program._transfer_edges
        if program.blocking:
            free = program.posted[nodes]
        else:
            free = program.after[[takers[node] for node in nodes.tolist()]]
        # Of each transfer: its edge in ``program.edges``, its node, and the fields of a ``Transfer``.
        rows = zip(
            edges.tolist(),
            nodes.tolist(),
            sizes[program._messages].tolist(),
            self.ends[program.after[nodes]].tolist(),
            begins[nodes].tolist(),
            self.ends[nodes].tolist(),
            (self.ends[nodes] + self.latencies[edges]).tolist(),
            self.ends[free].tolist(),
            slack[nodes].tolist(),
            strict=True,
        )
        actions, pairs = program.actions, program.edges
        made = [Transfer(actions[node], pairs[edge], *rest) for edge, node, *rest in rows]
        return tuple(sorted(made, key=lambda each: (each.begin, each.edge)))

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """Gradient reductions, by rank and begin."""
        program, begins = self.program, self.begins
        return tuple(
            Reduction(
                stage=action.stage,
                rank=int(program.ranks[node]),
                ready=float(self.ends[program.after[node]]),
                begin=float(begins[node]),
                end=float(self.ends[node]),
                slack=float(self.slack[node]),
            )
            for node, action in enumerate(program.actions)
            if node and action.kind is Kind.REDUCE
        )

    @cached_property
    def peaks(self) -> Floats:
        """Bytes each rank holds at most, activations and ``Costs.static``, [ranks]."""
        return memory_peaks(self.program.schedule, self.costs)

    @cached_property
    def critical(self) -> tuple[int, ...]:
        """Nodes of one longest chain from the start to the end of the step, in order."""
        program, begins = self.program, self.begins
        node, chain = int(self.ends.argmax()), []
        while node:
            chain.append(node)
            preds = [
                (float(self.ends[program.arrival[node]] + self.lags[node]), int(program.arrival[node])),
                (float(self.ends[program.after[node]]), int(program.after[node])),
                *(
                    (float(self.ends[other[node]] + lags[node]), int(other[node]))
                    for other, lags in self.others
                ),
            ]
            node = max((pred for pred in preds if pred[0] >= begins[node]), default=(0.0, 0))[1]
        return tuple(reversed(chain))

    def traffic(self, bins: int = 100) -> tuple[Floats, dict[Edge, Floats]]:
        """Bytes per second of each directed edge over the step: ends of ``bins`` equal intervals [bins + 1],
        and the mean rate in each [bins]. A message without a limit of bandwidth counts where it begins."""
        bounds = np.linspace(0.0, self.makespan, bins + 1)
        width = self.makespan / bins
        rates = {edge: np.zeros(bins) for edge in self.program.edges}
        for each in self.transfers:
            if each.sent > each.begin:
                inside = np.clip(
                    np.minimum(bounds[1:], each.sent) - np.maximum(bounds[:-1], each.begin), 0.0, None
                )
                rates[each.edge] += each.bytes * inside / (each.sent - each.begin) / width
            else:
                rates[each.edge][min(bins - 1, int(each.begin / width))] += each.bytes / width
        return bounds, rates
