"""Transfers and reductions of a schedule that names computations alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .actions import KINDS, RECV_B, RECV_F, REDUCE, SEND_B, SEND_F, Action, B, F, Placement, Schedule, W

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def lowered(schedule: Schedule, *, ahead: int = 1, reduce_early: bool = True) -> Schedule:
    """``schedule`` with transfers and reductions: a SEND right after the computation whose result it
    sends, a RECV at least ``ahead`` computations before the one that waits for it, and a REDUCE after the
    last computation of weight gradients of a stage (at the end of the rank's list if not ``reduce_early``).

    A RECV comes before the computation during which its message is sent where every F takes one unit and
    every B two, so that no SEND has to wait for room and the ranks cannot wait for each other, however long
    computations really take. RECVs of one directed edge follow the order of its SENDs: channels need no
    tags. Transfers and reductions that are there already are made anew."""
    ranks = [_Rank.of(schedule, rank) for rank in range(len(schedule.ranks))]
    begins, ends = _nominal_times(schedule, ranks)
    made = []
    for rank, own in enumerate(ranks):
        latest, sends = _receives(ranks, rank, begins[rank], ends, ahead)
        # Before a computation its RECVs, after it its SEND and REDUCE.
        parts = [(4 * latest, _received(sends))]
        parts += [(4 * np.arange(len(own)) + 1, own.rows())]
        index = np.flatnonzero(own.sent >= 0)
        parts += [(4 * index + 2, _of_messages(own.sent[index], own.placement, own.microbatches))]
        stages, last = own.last_gradients()
        if reduce_early:
            parts += [(4 * last + 3, _reductions(stages))]
        else:
            order = [stage for stage in own.placement.stages_of(rank) if stage in set(stages.tolist())]
            parts += [(np.full(len(order), 4 * len(own)), _reductions(np.array(order, dtype=np.int64)))]
        places = np.concatenate([each for each, _ in parts])
        rows = np.concatenate([each for _, each in parts], axis=1)
        kinds, stages, batches = rows[:, np.argsort(places, kind="stable")].tolist()
        made.append(tuple(map(Action, map(KINDS.__getitem__, kinds), stages, batches)))
    return Schedule(
        schedule.name, schedule.placement, schedule.microbatches, tuple(made), schedule.forward_only
    )


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Computations of one rank. A message is a number: that of its direction, sending stage and
    micro-batch; -1: none."""

    placement: Placement
    microbatches: int
    kinds: Ints
    stages: Ints
    batches: Ints
    seconds: Ints
    """1 for F and W, 2 for a whole B and 1 for one whose weight gradients a W computes."""

    sent: Ints
    """Message with each computation's result."""

    needed: Ints
    """Message that each computation waits for."""

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> _Rank:
        placement, microbatches = schedule.placement, schedule.microbatches
        found = schedule.columns[rank]
        kinds, stages, batches = (each[found.kinds <= W].astype(np.int64) for each in found)
        of_stage = np.array([placement.rank(stage) for stage in range(placement.stages)])
        crosses = np.concatenate([[False], of_stage[:-1] != of_stage[1:], [False]])
        forward, backward = kinds == F, kinds == B
        count = placement.stages * microbatches
        number = backward * count + stages * microbatches + batches
        whole = backward.copy()
        whole[whole] = ~schedule.split_table[stages[whole], batches[whole]]
        # Between stages s and s + 1 lies a transfer where ``crosses[s + 1]``.
        sends = (forward & crosses[stages + 1]) | (backward & crosses[stages])
        if schedule.forward_only:
            sends &= forward
        takes = (forward & crosses[stages]) | (backward & crosses[stages + 1])
        step = np.where(backward, microbatches, -microbatches)
        return cls(
            placement=placement,
            microbatches=microbatches,
            kinds=kinds,
            stages=stages,
            batches=batches,
            seconds=1 + whole,
            sent=np.where(sends, number, -1),
            needed=np.where(takes, number + step, -1),
        )

    def __len__(self) -> int:
        return len(self.kinds)

    def rows(self) -> Ints:
        """Kinds, stages and micro-batches, [3, computations]."""
        return np.stack([self.kinds, self.stages, self.batches])

    def last_gradients(self) -> tuple[Ints, Ints]:
        """Stages with gradients, and the place of the last B or W of each."""
        last = np.full(self.placement.stages, -1, dtype=np.int64)
        gradients = np.flatnonzero(self.kinds != F)
        last[self.stages[gradients]] = gradients
        stages = np.flatnonzero(last >= 0)
        return stages, last[stages]


def _of_messages(messages: Ints, placement: Placement, microbatches: int) -> Ints:
    """SENDs of ``messages``: kinds, stages and micro-batches."""
    back, rest = np.divmod(messages, placement.stages * microbatches)
    return np.stack([np.where(back, SEND_B, SEND_F), *np.divmod(rest, microbatches)])


def _received(sends: Ints) -> Ints:
    """RECVs of the neighbouring stages that take in ``sends``."""
    kinds, stages, batches = sends
    back = kinds == SEND_B
    return np.stack([np.where(back, RECV_B, RECV_F), np.where(back, stages - 1, stages + 1), batches])


def _reductions(stages: Ints) -> Ints:
    return np.stack([np.full(len(stages), REDUCE), stages, np.full(len(stages), -1)])


def _receives(
    ranks: list[_Rank], rank: int, begins: list[int], ends: list[int], ahead: int
) -> tuple[Ints, Ints]:
    """Places before which ``rank`` posts its RECVs, in their order, and the SENDs that they take in."""
    own = ranks[rank]
    placement, microbatches = own.placement, own.microbatches
    index = np.flatnonzero(own.needed >= 0)
    needed = np.full(2 * placement.stages * microbatches, -1, dtype=np.int64)
    needed[own.needed[index]] = index
    stages = np.divmod(own.needed[index], microbatches)[0] % placement.stages
    columns: list[list[Ints]] = [[], [], [], [], []]
    for sender in sorted({placement.rank(stage) for stage in np.unique(stages).tolist()}):
        sent = ranks[sender].sent
        numbers = np.flatnonzero(sent >= 0)
        numbers = numbers[needed[sent[numbers]] >= 0][::-1]
        messages = sent[numbers]
        soonest = np.minimum.accumulate(needed[messages])
        latest = np.maximum(0, soonest - ahead)
        ended = np.array(ends)[messages]
        known = np.maximum(0, np.searchsorted(np.array(begins), ended, side="right") - 1)
        latest = np.minimum.accumulate(np.where(ended >= 0, np.minimum(latest, known), latest))
        for column, values in zip(
            columns, (latest, soonest, np.full(len(numbers), sender), numbers, messages), strict=True
        ):
            column.append(values)
    latest, soonest, senders, numbers, messages = (
        np.concatenate([np.zeros(0, dtype=np.int64), *each]) for each in columns
    )
    order = np.lexsort((numbers, senders, soonest, latest))
    return latest[order], _of_messages(messages[order], placement, microbatches)


def _nominal_times(schedule: Schedule, ranks: list[_Rank]) -> tuple[list[list[int]], list[int]]:
    """Begins of each rank's computations, and by message the end of the computation that sends it (-1: it
    never ends), where transfers take no time. Computations that wait for each other for ever are left out."""
    needed, sent, seconds = (
        [getattr(each, name).tolist() for each in ranks] for name in ("needed", "sent", "seconds")
    )
    begins: list[list[int]] = [[] for _ in ranks]
    ends = [-1] * (2 * schedule.placement.stages * schedule.microbatches)
    free = [0] * len(ranks)
    waiting: dict[int, list[int]] = {}
    """Message -> ranks that wait for it: one, where the schedule is valid."""
    ready = deque(range(len(ranks)))
    while ready:
        rank = ready.popleft()
        found, now = begins[rank], free[rank]
        for place in range(len(found), len(needed[rank])):
            message = needed[rank][place]
            if message >= 0:
                end = ends[message]
                if end < 0:
                    waiting.setdefault(message, []).append(rank)
                    break
                now = max(now, end)
            found.append(now)
            now += seconds[rank][place]
            message = sent[rank][place]
            if message >= 0:
                ends[message] = now
                ready += waiting.pop(message, ())
        free[rank] = now
    return begins, ends
