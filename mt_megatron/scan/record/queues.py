"""What the threads of a program leave for the recorder's background thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from mt_megatron.scan.format.records import SPAN

from .encoder import Event

_T = TypeVar("_T")

MOST_BYTES = 64 << 20
"""Of each queue, as far as its entries' sizes are known: then what is queued is given up."""

_EACH = {"events": 300, "counters": 140, "pings": 250, "notes": 16 << 10}
"""Bytes that an entry takes in memory with its numbers and attributes: measured on usual ones; of notes the
longest (stacks of many threads)."""


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
        """Of ``events``, how many were taken so far."""
        self.dropped: dict[str, int] = {}
        """Entries that were given up, by queue; of spans the records."""

    def bound(self) -> None:
        """Give up what is queued when nobody comes for it (a disk that hangs): memory is not filled."""
        few = _EACH["events"] * (len(self.events) + len(self.counters)) <= MOST_BYTES
        if few and not (self.spans or self.notes or self.pings):
            # As it is at nearly every step.
            return
        for name, each in _EACH.items():
            queue: list[Any] = getattr(self, name)
            if len(queue) * each > MOST_BYTES:
                self._dropped(name, len(take(queue)))
        if len(self.spans) and sum(map(len, self.spans)) > MOST_BYTES:
            self._dropped("spans", sum(map(len, take(self.spans))) // SPAN.itemsize)

    def _dropped(self, name: str, count: int) -> None:
        self.dropped[name] = self.dropped.get(name, 0) + count

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
