"""Dependencies of every computation, transfer and reduction of a schedule, as arrays in topological order.

Actions of all ranks are rows of arrays, one rank after another: schedules of a million actions are compiled
while a run starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from ..actions import (
    KINDS,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    Action,
    B,
    Call,
    Columns,
    F,
    Kind,
    Placement,
    Schedule,
    W,
    columns,
)
from .costs import Edge

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Things that take time, and what must be over before they begin: arrays [nodes], each node after those
    that it waits for. Node 0 is the step's start, rank -1 and stage -1."""

    kinds: npt.NDArray[np.int8]
    """Places in ``KINDS``."""

    stages: npt.NDArray[np.int32]
    microbatches: npt.NDArray[np.int32]
    ranks: Ints
    """Of a transfer the sender."""

    after: Ints
    """The rank's computation before; of a transfer the one that it sends."""

    arrival: Ints
    """A computation's message; the transfer before on the same edge; the rank's reduction before."""

    arrival_edges: Ints
    """Index in ``pairs`` of the edge whose latency comes on top of the end of ``arrival``; -1: none."""

    posted: Ints
    """The receiving rank's last node before the RECV of a transfer; 0 where the receiver always has room."""

    edges: Ints
    """Of a transfer, its index in ``pairs``; -1: no transfer."""

    waits: Flags
    """Takes no time: the end of one transfer of a blocking exchange."""

    pairs: tuple[Edge, ...]
    """Directed edges, in the order of their first transfers."""


def nodes_of(
    schedule: Schedule,
    calls: Sequence[Sequence[Call]] | None,
    *,
    rendezvous: bool,
    reduce_early: bool,
    links: bool,
) -> Nodes:
    """The graph of ``schedule``. ``calls``: what the ranks do where exchanges block them; None: the
    schedule's own actions, SENDs and REDUCEs made for it where it has none. Without ``links`` messages are no
    nodes. Raises ConfigError as ``Program``."""
    if calls is not None:
        rows = _rows([_flat(each) for each in calls])
    else:
        rows = _rows([(each, np.zeros(len(each.kinds), dtype=bool)) for each in schedule.columns])
        if not schedule.is_lowered:
            rows = _sending(rows, schedule)
    return _Graph(_reducing(rows, schedule.placement, reduce_early), schedule, links).nodes(rendezvous)


class _Rows(NamedTuple):
    """Actions of all ranks, and ends of exchanges."""

    kinds: npt.NDArray[np.int8]
    stages: npt.NDArray[np.int32]
    microbatches: npt.NDArray[np.int32]
    ranks: Ints
    waits: Flags


def _rows(of_ranks: Sequence[tuple[Columns, Flags]]) -> _Rows:
    found = [columns([]), *(each for each, _ in of_ranks)]
    kinds, stages, microbatches = (np.concatenate(each) for each in zip(*found, strict=True))
    ranks = np.repeat(np.arange(len(of_ranks)), [len(waits) for _, waits in of_ranks])
    waits = np.concatenate([np.zeros(0, dtype=bool), *(waits for _, waits in of_ranks)])
    return _Rows(kinds, stages, microbatches, ranks, waits)


def _flat(calls: Sequence[Call]) -> tuple[Columns, Flags]:
    """``calls`` of one rank with each exchange as the transfers that it begins and the ends that it waits
    for."""
    actions: list[Action] = []
    waits: list[bool] = []
    begun: set[Action] = set()
    for call in calls:
        exchange: tuple[Action, ...] = () if isinstance(call, Action) else call
        begins = [call] if isinstance(call, Action) else [each for each in exchange if each not in begun]
        actions += [*begins, *exchange]
        waits += [False] * len(begins) + [True] * len(exchange)
        begun.update(begins)
    return columns(actions), np.array(waits, dtype=bool)


def _sending(rows: _Rows, schedule: Schedule) -> _Rows:
    """``rows``, which are computations, each with the SEND of its result after it."""
    last = schedule.placement.stages - 1
    moves = _ranks_of(schedule.placement)[1:-1]
    crosses = moves[:-1] != moves[1:]
    stages = rows.stages.astype(np.int64)
    forth, back = (rows.kinds == F) & (stages < last), (rows.kinds == B) & (stages > 0)
    if schedule.forward_only:
        back[:] = False
    forth[forth] = crosses[stages[forth]]
    back[back] = crosses[stages[back] - 1]
    found = np.flatnonzero(forth | back)
    kinds = np.where(rows.kinds[found] == F, SEND_F, SEND_B)
    return _inserted(rows, found, kinds, stages[found], rows.microbatches[found].astype(np.int64))


def _reducing(rows: _Rows, placement: Placement, early: bool) -> _Rows:
    """``rows`` with a REDUCE after the last gradients of each stage, or of the rank; where a rank has one
    already, it is left."""
    reduces = np.zeros(placement.ranks, dtype=bool)
    reduces[rows.ranks[rows.kinds == REDUCE]] = True
    gradients = np.flatnonzero(((rows.kinds == B) | (rows.kinds == W)) & ~rows.waits & ~reduces[rows.ranks])
    stages = rows.stages[gradients].astype(np.int64)
    latest = np.full((placement.ranks, placement.stages), -1, dtype=np.int64)
    latest[rows.ranks[gradients], stages] = gradients
    ranks, stages = np.nonzero(latest >= 0)
    after = latest[ranks, stages]
    if not early:
        order = np.lexsort((-stages, ranks))
        ranks, stages = ranks[order], stages[order]
        after = np.searchsorted(rows.ranks, ranks, side="right") - 1
    return _inserted(rows, after, np.full(len(after), REDUCE), stages, np.full(len(after), -1))


def _inserted(rows: _Rows, after: Ints, kinds: Ints, stages: Ints, microbatches: Ints) -> _Rows:
    """``rows`` with further ones, each after the row of number ``after``, those of one place in their
    order."""
    places = np.concatenate([2 * np.arange(len(rows.kinds)), 2 * after + 1])
    order = np.argsort(places, kind="stable")
    waits = np.zeros(len(after), dtype=bool)
    return _Rows(
        np.concatenate([rows.kinds, kinds.astype(np.int8)])[order],
        np.concatenate([rows.stages, stages.astype(np.int32)])[order],
        np.concatenate([rows.microbatches, microbatches.astype(np.int32)])[order],
        np.concatenate([rows.ranks, rows.ranks[after]])[order],
        np.concatenate([rows.waits, waits])[order],
    )


def _ranks_of(placement: Placement) -> Ints:
    """Rank of each stage from -1 to one behind the last, [stages + 2]."""
    return np.array([placement.rank(stage) for stage in range(-1, placement.stages + 1)])


class _Graph:
    """Nodes of ``rows``, numbered as they come, from 1."""

    def __init__(self, rows: _Rows, schedule: Schedule, links: bool) -> None:
        self.rows, self.schedule, self.placement = rows, schedule, schedule.placement
        kinds, waits = rows.kinds, rows.waits
        self.stages, self.microbatches = rows.stages.astype(np.int64), rows.microbatches.astype(np.int64)
        self.rank_of = _ranks_of(self.placement)
        self.computes = (kinds <= W) & ~waits
        self.sends = ((kinds == SEND_F) | (kinds == SEND_B)) & ~waits
        self.receives = ((kinds == RECV_F) | (kinds == RECV_B)) & ~waits
        self.reduces = kinds == REDUCE
        self.is_node = self.computes | waits | self.reduces | (self.sends & links)
        count = np.cumsum(self.is_node)
        self.number = np.where(self.is_node, count, 0)
        self.previous = self._previous(count)
        # The node whose end is a SEND's: without links that of what it sends. By direction, stage and
        # micro-batch; -1: nothing is sent.
        self.sent = self._table(self.sends, self.number if links else self.previous, missing=-1)

    def nodes(self, rendezvous: bool) -> Nodes:
        rows = self.rows
        self._check_local()
        arrival, comes = self._arrivals()
        edge = np.where(self.sends, rows.ranks * self.placement.ranks + self._targets(), -1)
        posted = np.zeros(len(edge), dtype=np.int64)
        if rendezvous:
            posts = self._table(self.receives, self.previous, matching=True)
            posted[self.sends] = posts[self._places(self.sends)]
        kept = np.flatnonzero(self.is_node)
        before = [np.concatenate([[0], each[kept]]) for each in (self.previous, arrival, posted)]
        order = self._order(kept, *before)
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        edges = np.concatenate([[-1], edge[kept]])[order]
        after, arrival, posted = (place[each[order]] for each in before)
        # Node 0 and computations without a message have no edge to wait on.
        waited = np.concatenate([[False], comes[kept]])[order]
        codes, firsts = np.unique(edges, return_index=True)
        codes = codes[np.argsort(firsts)]
        codes = codes[codes >= 0]
        index = np.full(self.placement.ranks * self.placement.ranks + 1, -1)
        index[codes] = np.arange(len(codes))
        edges = np.where(edges >= 0, index[edges], -1)
        return Nodes(
            kinds=np.concatenate([[np.int8(F)], rows.kinds[kept]])[order],
            stages=np.concatenate([[np.int32(-1)], rows.stages[kept]])[order],
            microbatches=np.concatenate([[np.int32(-1)], rows.microbatches[kept]])[order],
            ranks=np.concatenate([[-1], rows.ranks[kept]])[order],
            after=after,
            arrival=arrival,
            arrival_edges=np.where(waited, edges[arrival], -1),
            posted=posted,
            edges=edges,
            waits=np.concatenate([[False], rows.waits[kept]])[order],
            pairs=tuple(divmod(code, self.placement.ranks) for code in codes.tolist()),
        )

    def _previous(self, count: Ints) -> Ints:
        """Of each row the rank's last computation, or end of an exchange, before it; 0: none."""
        rows = self.rows
        advances = np.where(self.computes | rows.waits, self.number, 0)
        latest = np.maximum.accumulate(np.concatenate([[0], advances]))[: len(advances)]
        starts = np.searchsorted(rows.ranks, np.arange(self.placement.ranks + 1))
        others = np.concatenate([[0], count])[starts]  # nodes of earlier ranks, by rank
        return np.where(latest > others[rows.ranks], latest, 0)

    def _table(self, where: Flags, values: Ints, *, matching: bool = False, missing: int = 0) -> Ints:
        """``values`` of the SENDs (or, ``matching``, of the SENDs that the RECVs take in) in the rows
        ``where``, as [directions x stages x micro-batches]. The last of each."""
        shape = 2 * (self.placement.stages + 2) * self.schedule.microbatches
        found = np.full(shape, missing, dtype=np.int64)
        found[self._places(where, matching=matching)] = values[where]
        return found

    def _places(self, where: Flags, *, matching: bool = False) -> Ints:
        """Where ``_table`` holds each row of ``where``: a transfer, or what waits for the matching one."""
        kinds = self.rows.kinds[where]
        back = (kinds == SEND_B) | (kinds == RECV_B) | (kinds == B)
        stages = self.stages[where]
        if matching:
            stages = np.where(back, stages + 1, stages - 1)
        rows: Ints = back * (self.placement.stages + 2) + stages + 1
        return rows * self.schedule.microbatches + self.microbatches[where]

    def _targets(self) -> Ints:
        """Receiving rank of each SEND."""
        found = np.zeros(len(self.stages), dtype=np.int64)
        stages = self.stages[self.sends]
        to = np.where(self.rows.kinds[self.sends] == SEND_F, stages + 1, stages - 1)
        found[self.sends] = self.rank_of[to + 1]
        return found

    def _arrivals(self) -> tuple[Ints, Flags]:
        """What each row waits for besides the computation before, and whether it is a message from
        another rank."""
        rows, kinds = self.rows, self.rows.kinds
        arrival = np.zeros(len(kinds), dtype=np.int64)
        for where, group in (
            (self.sends, rows.ranks * self.placement.ranks + self._targets()),
            (self.reduces, rows.ranks),
        ):
            arrival[where] = _shifted(self.number[where], group[where])
        ends = rows.waits & ((kinds == SEND_F) | (kinds == SEND_B))
        arrival[ends] = self.sent[self._places(ends)]
        receives = rows.waits & ~ends
        last = self.placement.stages - 1
        other = self.rank_of[self.stages + 1] != self.rank_of[self.stages + np.where(kinds == B, 2, 0)]
        takes = self.computes & (((kinds == F) & (self.stages > 0)) | ((kinds == B) & (self.stages < last)))
        comes = receives | (takes & other)
        arrival[comes] = self.sent[self._places(comes, matching=True)]
        lost = np.flatnonzero(comes & (arrival < 0))
        if len(lost):
            row = lost[0]
            stage, kind = int(self.stages[row]), SEND_F if kinds[row] in (F, RECV_F) else SEND_B
            stage += -1 if kind == SEND_F else 1
            send = Action(KINDS[kind], stage, int(self.microbatches[row]))
            raise ConfigError(
                f"{self._action(row)} on rank {rows.ranks[row]} waits for {send}, which no rank sends"
            )
        return arrival, comes

    def _check_local(self) -> None:
        """Raise unless what each computation needs of its own rank came before it."""
        stages, batches, kinds = self.placement.stages, self.schedule.microbatches, self.rows.kinds
        rows = np.flatnonzero(self.computes)
        of_kind, of_stage, of_batch = kinds[rows].astype(np.int64), self.stages[rows], self.microbatches[rows]
        first = np.full((3, stages + 2, batches), len(kinds), dtype=np.int64)
        first[of_kind[::-1], of_stage[::-1] + 1, of_batch[::-1]] = rows[::-1]
        own = self.rank_of[of_stage + 1] == self.rows.ranks[rows]
        wrong = (of_kind == B) & own & (first[F, of_stage + 1, of_batch] > rows)
        wrong |= (of_kind == W) & own & (first[B, of_stage + 1, of_batch] > rows)
        other = np.where(of_kind == F, of_stage - 1, of_stage + 1)
        needs = (of_kind != W) & (other >= 0) & (other < stages)
        needs &= self.rank_of[other + 1] == self.rows.ranks[rows]
        late = needs & (first[of_kind, other + 1, of_batch] > rows)
        found = np.flatnonzero(wrong | late)
        if len(found):
            at = found[0]
            kind, stage, batch = KINDS[of_kind[at]], int(of_stage[at]), int(of_batch[at])
            need = Action(kind, int(other[at]), batch)
            if wrong[at]:
                need = Action(Kind.B if kind is Kind.W else Kind.F, stage, batch)
            raise ConfigError(
                f"rank {self.rows.ranks[rows[at]]} of schedule {self.schedule.name}: "
                f"{Action(kind, stage, batch)} comes before {need}"
            )

    def _order(self, kept: Ints, after: Ints, arrival: Ints, posted: Ints) -> Ints:
        """Numbers of the nodes in topological order; ``kept``: their rows."""
        count = len(after)
        nodes = np.arange(count)
        second = (arrival != after) & (nodes > 0)
        third = (posted != after) & (posted != arrival) & (nodes > 0)
        others = np.concatenate([after[1:], arrival[second], posted[third]])
        waiting = np.concatenate([nodes[1:], nodes[second], nodes[third]])
        left = (np.minimum(nodes, 1) + second + third).tolist()
        by_other = np.lexsort((waiting, others))
        followers: list[int] = waiting[by_other].tolist()
        bounds: list[int] = np.searchsorted(others[by_other], np.arange(count + 1)).tolist()
        order: list[int] = []
        ready = [0]
        while ready:
            node = ready.pop()
            order.append(node)
            for follower in followers[bounds[node] : bounds[node + 1]]:
                left[follower] -= 1
                if not left[follower]:
                    ready.append(follower)
        if len(order) < count:
            stuck = kept[min(node for node, number in enumerate(left) if number) - 1]
            raise ConfigError(
                f"the ranks wait for each other for ever: {count - len(order)} actions never begin, among "
                f"them {self._action(stuck)} on rank {self.rows.ranks[stuck]}"
            )
        return np.array(order)

    def _action(self, row: int) -> Action:
        kind, stage, batch = self.rows.kinds[row], self.rows.stages[row], self.rows.microbatches[row]
        return Action(KINDS[kind], int(stage), int(batch))


def _shifted(values: Ints, groups: Ints) -> Ints:
    """For each of ``values`` the one before it in its group; 0 for the first."""
    order = np.argsort(groups, kind="stable")
    found = np.zeros(len(values), dtype=np.int64)
    ordered = values[order]
    same = groups[order][1:] == groups[order][:-1]
    found[order[1:][same]] = ordered[:-1][same]
    return found
