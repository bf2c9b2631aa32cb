"""Streams and events for a device that finishes every operation before it returns."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any


class Event:
    """``torch.cuda.Event`` for synchronous execution: a moment on the monotonic clock."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        if interprocess:
            raise NotImplementedError("the cpu backend has no events that are shared between processes")
        self._timed = enable_timing
        self._at_ns: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._at_ns = time.perf_counter_ns()

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to wait for: what was recorded has already finished."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for: what was recorded has already finished."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: one of the two was not recorded, or was made without ``enable_timing``.
        """
        if not (self._timed and end_event._timed):
            raise RuntimeError("elapsed_time needs both events to be made with enable_timing=True")
        if self._at_ns is None or end_event._at_ns is None:
            raise RuntimeError("elapsed_time needs both events to be recorded first")
        return (end_event._at_ns - self._at_ns) / 1e6


class Stream:
    """``torch.cuda.Stream`` for synchronous execution: an identity, and nothing to order."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = device
        self.priority = priority
        self.cuda_stream = 0

    def synchronize(self) -> None:
        """Nothing is pending."""

    def wait_stream(self, stream: Stream) -> None:
        """Nothing is pending."""

    def wait_event(self, event: Event) -> None:
        """Nothing is pending."""

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class StreamTable:
    """The default stream and the current one, as ``torch.cuda`` keeps them."""

    def __init__(self) -> None:
        self.default = Stream()
        self.current = self.default

    def set_current(self, stream: Stream | None) -> None:
        if stream is not None:
            self.current = stream


class StreamContext:
    """``with torch.cuda.stream(s)``: makes ``s`` current, and the old one again afterwards."""

    def __init__(self, table: StreamTable, stream: Stream | None) -> None:
        self._table = table
        self._stream = stream
        self._before: Stream | None = None

    def __enter__(self) -> None:
        self._before = self._table.current
        self._table.set_current(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._table.set_current(self._before)
