"""Quick check of the rules that ``validate`` has sentences for, by arrays of all actions of a schedule.

``validate`` looks for what is wrong, action by action, only where this says that something is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .actions import RECV_B, RECV_F, REDUCE, SEND_B, SEND_F, B, F, Schedule, W

Ints = npt.NDArray[np.int64]

_NOWHERE = np.iinfo(np.int64).max


def is_sound(schedule: Schedule) -> bool:
    """True where every action names what exists; each F and B is there once, in order and after what it
    needs, like each W; and transfers and reductions, where they are named, match them."""
    if not _names_what_exists(schedule):
        return False
    table = _Table(schedule)
    return table.counts_are_right() and table.is_ordered() and (not schedule.is_lowered or table.matches())


def _names_what_exists(schedule: Schedule) -> bool:
    placement = schedule.placement
    if len(schedule.ranks) != placement.ranks:
        return False
    of_stage = np.array([placement.rank(stage) for stage in range(placement.stages)])
    for rank, (kinds, stages, batches) in enumerate(schedule.columns):
        if not ((stages >= 0) & (stages < placement.stages)).all() or (of_stage[stages] != rank).any():
            return False
        reduces = kinds == REDUCE
        wrong = np.where(reduces, batches != -1, (batches < 0) | (batches >= schedule.microbatches))
        if schedule.forward_only:
            wrong |= (kinds != F) & (kinds != SEND_F) & (kinds != RECV_F)
        if wrong.any():
            return False
    return True


class _Table:
    """Places of the actions in their ranks' lists, [kinds, stages, micro-batches]."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, placement = schedule, schedule.placement
        shape = (REDUCE, placement.stages, schedule.microbatches)
        self.count = np.zeros(shape, dtype=np.int64)
        self.place = np.full(shape, _NOWHERE, dtype=np.int64)
        self.reductions = np.zeros(placement.stages, dtype=np.int64)
        self.reduced = np.full(placement.stages, _NOWHERE, dtype=np.int64)
        for kinds, stages, batches in schedule.columns:
            of_batch = kinds != REDUCE
            where = kinds[of_batch], stages[of_batch], batches[of_batch]
            np.add.at(self.count, where, 1)
            self.place[where] = np.flatnonzero(of_batch)
            np.add.at(self.reductions, stages[~of_batch], 1)
            self.reduced[stages[~of_batch]] = np.flatnonzero(~of_batch)
        self.split = self.count[W] > 0
        of_stage = np.array([placement.rank(stage) for stage in range(placement.stages)])
        self.of_stage = of_stage
        self.crosses = of_stage[:-1] != of_stage[1:]
        """Between each stage and the next one."""

    def counts_are_right(self) -> bool:
        forward, backward, weight = self.count[: W + 1]
        wanted = 0 if self.schedule.forward_only else 1
        return bool((forward == 1).all() and (backward == wanted).all() and (weight <= 1).all())

    def is_ordered(self) -> bool:
        """Each computation after what it needs of its own rank, and micro-batches of a stage in order. Given
        that counts are right."""
        forward, backward, weight = self.place[: W + 1]
        local = ~self.crosses
        if not (_rises(forward) and (forward[:-1][local] < forward[1:][local]).all()):
            return False
        if self.schedule.forward_only:
            return not self.split.any()
        if not (_rises(backward) and (backward[1:][local] < backward[:-1][local]).all()):
            return False
        late = (forward < backward) & (~self.split | (backward < weight))
        # What adds weight gradients.
        return bool(late.all()) and _rises(np.where(self.split, weight, backward))

    def matches(self) -> bool:
        """Transfers are those of the computations, each once, at the right side of its computation, and
        received in the order of the sends; reductions come once, after the last gradients."""
        wanted = np.zeros(self.count.shape, dtype=np.int64)
        wanted[SEND_F, :-1] = wanted[RECV_F, 1:] = self.crosses[:, None]
        if not self.schedule.forward_only:
            wanted[SEND_B, 1:] = wanted[RECV_B, :-1] = self.crosses[:, None]
        if (self.count[SEND_F:] != wanted[SEND_F:]).any():
            return False
        place = self.place
        for send, receive, computation in ((SEND_F, RECV_F, F), (SEND_B, RECV_B, B)):
            sent, received = wanted[send] > 0, wanted[receive] > 0
            if (place[send][sent] < place[computation][sent]).any():
                return False
            if (place[receive][received] > place[computation][received]).any():
                return False
        return self._is_received_in_order() and self._reduces()

    def _is_received_in_order(self) -> bool:
        batches = self.schedule.microbatches
        edges, sends, receives = [], [], []
        # Of each pair of neighbouring stages on two ranks the messages forth and back.
        for send, receive, ahead in ((SEND_F, RECV_F, True), (SEND_B, RECV_B, False)):
            if self.schedule.forward_only and not ahead:
                continue
            low = np.flatnonzero(self.crosses)
            source, target = (low, low + 1) if ahead else (low + 1, low)
            edge = self.of_stage[source] * self.schedule.placement.ranks + self.of_stage[target]
            edges.append(np.repeat(edge, batches))
            sends.append(self.place[send][source].ravel())
            receives.append(self.place[receive][target].ravel())
        edge, sent, received = (np.concatenate(each) for each in (edges, sends, receives))
        return bool((np.lexsort((sent, edge)) == np.lexsort((received, edge))).all())

    def _reduces(self) -> bool:
        placement = self.schedule.placement
        # Of each stage the last computation of gradients, of which every micro-batch has one.
        backward, weight = (np.where(self.count[kind] > 0, self.place[kind], -1) for kind in (B, W))
        last = np.maximum(backward, weight).max(axis=1, initial=-1)
        for rank in range(placement.ranks):
            own = list(placement.stages_of(rank))
            if self.reductions[own].any() and not (
                (self.reductions[own] == 1).all() and (self.reduced[own] > last[own]).all()
            ):
                return False
        return True


def _rises(places: Ints) -> bool:
    """True where later micro-batches of each stage come later."""
    return bool((np.diff(places, axis=1) > 0).all())
