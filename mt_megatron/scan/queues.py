"""What the threads of a program leave for the recorder's background thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from mt_megatron.scan.encode import Event

_T = TypeVar("_T")
_MOST_QUEUED = 500_000


class Queues:
    """Lists; ``append`` is all that other threads call of them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.spans: list[bytes] = []
        """Bytes of ``records.SPAN``."""
        self.counters: list[tuple[int, float, int, int]] = []
        """Time, value, name's number, device."""
        self.pings: list[tuple[int, int, int, int, int]] = []
        """Sent, received, answered, returned, peer."""
        self.notes: list[Mapping[str, Any]] = []
        self.taken = 0
        """Events that were taken so far."""
        self.dropped = 0
        """Events that were given up."""

    def bound(self) -> None:
        """Give up what is queued when nobody comes for it (a disk that hangs): memory is not filled."""
        if len(self.events) > _MOST_QUEUED:
            self.dropped += len(take(self.events))
        others: tuple[list[Any], ...] = (self.spans, self.counters, self.pings, self.notes)
        for queue in others:
            if len(queue) > _MOST_QUEUED:
                take(queue)

    def close(self) -> None:
        """Keep nothing from now on: nobody comes for it any more."""
        for name in ("events", "spans", "counters", "pings", "notes"):
            getattr(self, name).clear()
            if name != "events":
                setattr(self, name, _Nowhere())


class _Nowhere(list[Any]):
    """A queue after the end."""

    def append(self, item: Any) -> None:
        """Forget it."""


def take(queue: list[_T]) -> list[_T]:
    """Everything queued so far. Others may append meanwhile: the interpreter does each of the two at once."""
    taken = queue[: len(queue)]
    del queue[: len(taken)]
    return taken
