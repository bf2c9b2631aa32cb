"""Megatron-Core's own calls under its two schedules: computations, and blocking exchanges between them.

``megatron/core/pipeline_parallel/schedules.py`` sends and receives in batches (``batch_isend_irecv``) and
waits for the whole batch before it computes on. The simulator can time these calls as they are, and the
trace simulator in ``tools/`` plays them.
"""

from __future__ import annotations

from ..errors import ConfigError
from .actions import Action, Call, Kind, Schedule, transfer_out, transfers_in
from .generate.catalogue import generate
from .generate.looping import interleaved_ahead, plain_ahead


def upstream_calls(schedule: Schedule, *, overlap: bool = False) -> tuple[tuple[Call, ...], ...]:
    """Calls of each rank where Megatron-Core runs ``schedule``, which ``generate`` made as ``1f1b`` or
    ``interleaved``. ``overlap``: interleaved with ``overlap_p2p_comm``, whose transfers start after a
    computation and are waited for, sends too, before the next one of the same direction. Raises ConfigError
    for any other schedule."""
    placement, microbatches = schedule.placement, schedule.microbatches
    if schedule.name not in ("1f1b", "interleaved") or schedule != generate(
        schedule.name, ranks=placement.ranks, chunks=placement.chunks, microbatches=microbatches
    ):
        raise ConfigError(f"found {schedule.name}; expected 1f1b or interleaved as Megatron-Core runs them")
    make = _plain if schedule.name == "1f1b" else _overlapping if overlap else _interleaved
    return tuple(tuple(make(_Rank(schedule, rank))) for rank in range(placement.ranks))


class _Rank:
    """Forwards and backwards of one rank, and the transfers that belong to them."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        placement = schedule.placement
        self._placement = placement
        self.forwards = [action for action in schedule.ranks[rank] if action.kind is Kind.F]
        self.backwards = [action for action in schedule.ranks[rank] if action.kind is Kind.B]
        ahead = (
            plain_ahead(placement, rank)
            if placement.chunks == 1
            else interleaved_ahead(placement, schedule.microbatches, rank)
        )
        self.ahead = min(ahead, len(self.forwards))
        self.pairs = len(self.forwards) - self.ahead

    def send(self, action: Action) -> list[Action]:
        """The SEND of the result of ``action``, if there is one."""
        sent = transfer_out(self._placement, action)
        return [] if sent is None else [sent]

    def receive(self, actions: list[Action], index: int) -> list[Action]:
        """The RECV that the ``index``-th of ``actions`` waits for, if there are both."""
        received = transfers_in(self._placement, actions[index]) if index < len(actions) else None
        return [] if received is None else [received]


def _exchange(*transfers: list[Action]) -> list[Call]:
    whole = tuple(transfer for each in transfers for transfer in each)
    return [whole] if whole else []


def _plain(rank: _Rank) -> list[Call]:
    forwards, backwards, ahead = rank.forwards, rank.backwards, rank.ahead
    made: list[Call] = []
    for index, forward in enumerate(forwards[:ahead]):
        made += [*_exchange(rank.receive(forwards, index)), forward, *_exchange(rank.send(forward))]
    made += _exchange(rank.receive(forwards, ahead))
    for index, (forward, backward) in enumerate(zip(forwards[ahead:], backwards, strict=False)):
        made += [forward, *_exchange(rank.send(forward), rank.receive(backwards, index)), backward]
        made += _exchange(rank.send(backward), rank.receive(forwards, ahead + index + 1))
    for index, backward in enumerate(backwards[rank.pairs :], start=rank.pairs):
        made += [*_exchange(rank.receive(backwards, index)), backward, *_exchange(rank.send(backward))]
    return made


def _interleaved(rank: _Rank) -> list[Call]:
    forwards, backwards, ahead = rank.forwards, rank.backwards, rank.ahead
    made: list[Call] = _exchange(rank.receive(forwards, 0))
    for index, forward in enumerate(forwards[:ahead]):
        turns = index == ahead - 1 and rank.pairs > 0
        gradient = rank.receive(backwards, 0) if turns else []
        made += [forward, *_exchange(rank.send(forward), rank.receive(forwards, index + 1), gradient)]
    for index, (forward, backward) in enumerate(zip(forwards[ahead:], backwards, strict=False)):
        made += [forward, backward]
        made += _exchange(
            rank.send(forward),
            rank.send(backward),
            rank.receive(forwards, ahead + index + 1),
            rank.receive(backwards, index + 1),
        )
    if not rank.pairs:
        made += _exchange(rank.receive(backwards, 0))
    for index, backward in enumerate(backwards[rank.pairs :], start=rank.pairs):
        made += [backward, *_exchange(rank.send(backward), rank.receive(backwards, index + 1))]
    return made


def _overlapping(rank: _Rank) -> list[Call]:
    forwards, backwards, ahead = rank.forwards, rank.backwards, rank.ahead
    made: list[Call] = _exchange(rank.receive(forwards, 0))
    forth: list[Action] = []
    back: list[Action] = []
    for index, forward in enumerate(forwards[:ahead]):
        made += [*_exchange(forth), forward]
        forth = [*rank.send(forward), *rank.receive(forwards, index + 1)]
        back = rank.receive(backwards, 0) if index == ahead - 1 and rank.pairs else []
        made += [*forth, *back]
    for index, (forward, backward) in enumerate(zip(forwards[ahead:], backwards, strict=False)):
        made += [*_exchange(forth), forward]
        forth = [*rank.send(forward), *rank.receive(forwards, ahead + index + 1)]
        made += [*forth, *_exchange(back), backward]
        back = [*rank.send(backward), *rank.receive(backwards, index + 1)]
        made += back
    made += _exchange(back)
    if not rank.pairs:
        made += _exchange(rank.receive(backwards, 0))
    for index, backward in enumerate(backwards[rank.pairs :], start=rank.pairs):
        made += [backward, *_exchange(rank.send(backward), rank.receive(backwards, index + 1))]
    return made
