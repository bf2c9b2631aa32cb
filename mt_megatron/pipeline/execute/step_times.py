"""Begin and end of the actions of one step on this rank.

Marks are host times where the host computes; on a device that queues its work they are events in the current
stream, which cost no waiting and are read once the device has passed them. Times of one rank share a clock;
those of two ranks do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...backends.base import Backend
from ..actions import Action, Kind

WAITED = 100_000
"""Nanoseconds from which a receive counts as waited for: its end is when the message arrived. Below, the
message was there already, and when it came is not known."""


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Times of one rank in one step, in nanoseconds from its own begin of the step."""

    seconds: int
    """Nanoseconds from the begin to the end of the step."""

    computed: dict[Action, int] = field(default_factory=dict)
    """How long each F, B and W took, without waiting for its input."""

    sent: dict[Action, int] = field(default_factory=dict)
    """When each SEND was started."""

    arrived: dict[Action, int] = field(default_factory=dict)
    """When the message of a RECV arrived, of those that were waited for."""

    kept: dict[int, int] = field(default_factory=dict)
    """Bytes that an F of each stage leaves behind for its B; nothing where the device does not say."""

    memory: int | None = None
    """Bytes that this process has held at most; None where the device does not say."""

    capacity: int | None = None
    """Bytes that the device has."""


class StepTimes:
    """Marks of one step; used once."""

    def __init__(self, backend: Backend) -> None:
        self._make: Callable[[], Any] = backend.timed_event
        self.is_host = backend.timed_event() is None
        """True where marks are host times, which can be read at once."""
        # The host's memory belongs to other processes too: what a rank may have of it is not known.
        self._device = None if backend.device_type == "cpu" else backend
        self._computed: list[tuple[Action, Any, Any]] = []
        self._held: dict[int, list[int]] = {}
        self._held_before = 0
        self._waits: list[tuple[Action, Any, Any]] = []
        self._sent: list[tuple[Action, Any]] = []
        self._begin = self.mark()
        self._end: Any = None

    def mark(self) -> Any:
        """Now, in what is queued for the device or on the host."""
        if self.is_host:
            return time.perf_counter_ns()
        event = self._make()
        event.record()
        return event

    def begins(self, action: Action) -> Any:
        """``action`` begins, its input being there: what ``computed`` is given."""
        if self._device is not None and action.kind is Kind.F:
            self._held_before = self._device.memory_allocated() or 0
        return self.mark()

    def computed(self, action: Action, begin: Any) -> None:
        """``action`` has been computed since ``begins``."""
        self._computed.append((action, begin, self.mark()))
        if self._device is not None and action.kind is Kind.F:
            held = (self._device.memory_allocated() or 0) - self._held_before
            self._held.setdefault(action.stage, []).append(held)

    def waited(self, receive: Action, begin: Any) -> None:
        """The message of ``receive`` is there, after a wait since the mark ``begin``."""
        self._waits.append((receive, begin, self.mark()))

    def sent(self, send: Action) -> None:
        """``send`` is about to be started."""
        self._sent.append((send, self.mark()))

    def end(self) -> None:
        """The step is over but for what the reduction of gradients still takes."""
        self._end = self.mark()

    def read(self) -> RankTimes | None:
        """The times; None while the device has not got to the end of the step."""
        if self._end is None or not (self.is_host or self._end.query()):
            return None
        at = self._since_begin
        return RankTimes(
            seconds=at(self._end),
            computed={action: at(end) - at(begin) for action, begin, end in self._computed},
            sent={action: at(mark) for action, mark in self._sent},
            arrived={action: at(end) for action, begin, end in self._waits if at(end) - at(begin) >= WAITED},
            # The largest: packed micro-batches differ. 0 is not known: a forward step may free more than it
            # allocates.
            kept={stage: max(0, *held) for stage, held in self._held.items()},
            memory=None if self._device is None else self._device.max_memory_allocated(),
            capacity=None if self._device is None else self._device.total_memory(),
        )

    def _since_begin(self, mark: Any) -> int:
        if self.is_host:
            found: int = mark - self._begin
            return found
        return int(round(self._begin.elapsed_time(mark) * 1e6))
