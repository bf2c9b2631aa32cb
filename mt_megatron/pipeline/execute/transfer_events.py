"""Events of the executor's transfers, as upstream's schedules emit them.

A transfer is numbered by its place among those of the same directed pair of ranks in the sender's list of
actions: both sides know it without a message, in whatever order each of them posts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

from mt_megatron.pipeline.actions import Action, Kind, Schedule, Style, matching_send
from mt_megatron.seams import collectives, events

Phase = Literal["start", "wait"]


class TransferEvents:
    """Of one rank and step. Nothing where nobody listens when the step begins."""

    def __init__(self, schedule: Schedule, rank: int, ranks: tuple[int, ...], group: Any) -> None:
        """``rank``: in the pipeline; ``ranks``: global ranks of the pipeline, ``group`` their group."""
        self._on = events.listening()
        if not self._on:
            return
        self._placement = placement = schedule.placement
        self._members = collectives.group_of("pp", group).ranks
        self._numbers: dict[Action, tuple[str, int, int]] = {}
        """Per SEND of this rank or to it: direction, the peer's global rank, number."""

        for sender, actions in enumerate(schedule.ranks):
            targets: dict[int, list[Action]] = {}
            for action in actions:
                if action.kind in (Kind.SEND_F, Kind.SEND_B):
                    targets.setdefault(placement.rank(receiver_stage(action)), []).append(action)
            for target, sent in targets.items():
                if sender == rank:
                    self._count(
                        "send", ranks[target], collectives.reserve_sent(ranks[target], len(sent)), sent
                    )
                elif target == rank:
                    first = collectives.reserve_received(ranks[sender], len(sent))
                    self._count("recv", ranks[sender], first, sent)

    def _count(self, op: str, peer: int, first: int, sent: list[Action]) -> None:
        for number, action in enumerate(sent, start=first):
            self._numbers[action] = op, peer, number

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
        op, peer, number = self._numbers[sent]
        earlier = min(sent.stage, receiver_stage(sent))
        comes_back = self._placement.style is Style.V and earlier >= self._placement.ranks
        to_next = (sent.kind is Kind.SEND_F) != comes_back
        attrs: dict[str, Any] = {
            "group": "pp",
            "ranks": self._members,
            "bytes": given,
            "transfers": ((op, peer, number, size),),
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
