"""Events of the executor's transfers, as upstream's schedules emit them.

A transfer is numbered by its place among those of the same directed pair of ranks in the sender's list of
actions: both sides know it without a message, in whatever order each of them posts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

from mt_megatron.pipeline.actions import Action, Kind, Placement, Schedule, Style, matching_send
from mt_megatron.seams import collectives, events

Phase = Literal["start", "wait"]


class TransferNumbers:
    """Places of the transfers of one rank in its schedule, which each step adds to its numbers."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        """``rank``: in the pipeline."""
        self.counts: dict[tuple[str, int], int] = {}
        """(``send`` or ``recv``, the peer's pipeline rank) -> transfers in a step."""

        self.places: dict[Action, tuple[str, int, int]] = {}
        """Per SEND of this rank or to it: ``send`` or ``recv``, the peer's pipeline rank, place."""

        for sender, actions in enumerate(schedule.ranks):
            for action in actions:
                if action.kind not in (Kind.SEND_F, Kind.SEND_B):
                    continue
                target = schedule.placement.rank(receiver_stage(action))
                if rank not in (sender, target):
                    continue
                key = ("send", target) if sender == rank else ("recv", sender)
                self.places[action] = *key, self.counts.get(key, 0)
                self.counts[key] = self.counts.get(key, 0) + 1


class TransferEvents:
    """Of one rank and step. Nothing where nobody listens when the step begins."""

    def __init__(
        self, numbers: TransferNumbers, placement: Placement, ranks: tuple[int, ...], group: Any
    ) -> None:
        """``ranks``: global ranks of the pipeline, ``group`` their group."""
        self._on = events.listening()
        if not self._on:
            return
        self._placement = placement
        self._ranks = ranks
        self._members = collectives.group_of("pp", group).ranks
        self._places = numbers.places
        reserve = {"send": collectives.reserve_sent, "recv": collectives.reserve_received}
        self._first = {
            (op, peer): reserve[op](ranks[peer], count) for (op, peer), count in numbers.counts.items()
        }

    def send(self, action: Action, size: int) -> AbstractContextManager[None]:
        """Around the posting of a SEND of ``size`` bytes."""
        # A whole transfer, not the start of one: when its memory is asked for again says nothing about when
        # it arrived, and both sides' times together tell how long it took.
        return self._span(action, size, size, None) if self._on else events.IDLE

    def receive(self, action: Action, size: int, phase: Phase) -> AbstractContextManager[None]:
        """Around the posting of a RECV, or the wait for it. ``size`` -1: not known."""
        return self._span(matching_send(action), 0, size, phase) if self._on else events.IDLE

    def drain(self, action: Action) -> AbstractContextManager[None]:
        """Around the wait, at the end of a step, for a SEND and those before it on the same edge."""
        return self._span(action, 0, -1, "wait") if self._on else events.IDLE

    def _span(self, sent: Action, given: int, size: int, phase: Phase | None) -> AbstractContextManager[None]:
        op, peer, place = self._places[sent]
        transfer = op, self._ranks[peer], self._first[op, peer] + place, size
        earlier = min(sent.stage, receiver_stage(sent))
        comes_back = self._placement.style is Style.V and earlier >= self._placement.ranks
        to_next = (sent.kind is Kind.SEND_F) != comes_back
        attrs: dict[str, Any] = {
            "group": "pp",
            "ranks": self._members,
            "bytes": given,
            "transfers": (transfer,),
            "send_next": op == "send" and to_next,
            "send_prev": op == "send" and not to_next,
            "recv_prev": op == "recv" and to_next,
            "recv_next": op == "recv" and not to_next,
        }
        if phase is not None:
            attrs["asynchronous"] = phase
        return events.described("p2p", attrs)


def receiver_stage(sent: Action) -> int:
    """The stage that a SEND goes to."""
    return sent.stage + 1 if sent.kind is Kind.SEND_F else sent.stage - 1
