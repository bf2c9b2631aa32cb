"""Streams and events that look asynchronous: what was recorded is pending until somebody waits for it.

Every kernel has really finished when it returns. But code that reads an event without having waited
is wrong on a device, so here too a fresh event is not done and has no time.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch

_PENDING_NS = 200_000
"""For so long after it was recorded an event that nobody waits for is not done."""


class Event:
    """``torch.musa.Event``."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        if interprocess:
            raise NotImplementedError("the torch_musa emulator has no events shared between processes")
        self._timed = enable_timing
        self._at_ns: int | None = None
        self._waited = False

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Event:
        raise NotImplementedError("the torch_musa emulator has no events shared between processes")

    def ipc_handle(self) -> Any:
        raise NotImplementedError("the torch_musa emulator has no events shared between processes")

    def record(self, stream: Stream | None = None) -> None:
        self._at_ns, self._waited = time.perf_counter_ns(), False
        (current_stream() if stream is None else stream)._take(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Orders streams and tells the host nothing."""

    def query(self) -> bool:
        if self._at_ns is None or self._waited:
            return True
        return time.perf_counter_ns() - self._at_ns > _PENDING_NS

    def synchronize(self) -> None:
        self._waited = True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds. Raises RuntimeError unless both are timed, recorded and done."""
        for event in (self, end_event):
            if not event._timed:
                raise RuntimeError("Both events must be created with argument 'enable_timing=True'")
            if event._at_ns is None:
                raise RuntimeError("Both events must be recorded before calculating elapsed time")
            if not event.query():
                raise RuntimeError("MUSA error: device not ready (an event was read before it was done)")
        assert self._at_ns is not None and end_event._at_ns is not None
        return (end_event._at_ns - self._at_ns) / 1e6


class Stream:
    """``torch.musa.Stream``: an identity, and the events recorded on it."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device_index = 0
        self.priority = priority
        self.stream_id = id(self)
        self.musa_stream = id(self)
        self._pending: list[Event] = []

    @property
    def device(self) -> torch.device:
        return torch.device("musa", 0)

    def _take(self, event: Event) -> None:
        if len(self._pending) >= 64:
            self._pending = [each for each in self._pending if not each.query()]
        self._pending.append(event)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return all(event.query() for event in self._pending)

    def synchronize(self) -> None:
        while self._pending:
            self._pending.pop().synchronize()


class ExternalStream(Stream):
    """``torch.musa.ExternalStream``."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self.musa_stream = stream_ptr


_default = Stream()
_current = _default
_others: list[Stream] = []


def current_stream(device: Any = None) -> Stream:
    return _current


def default_stream(device: Any = None) -> Stream:
    return _default


def set_stream(stream: Stream | None) -> None:
    global _current
    if stream is not None:
        _current = stream
        if stream is not _default and stream not in _others:
            _others.append(stream)


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    found = [each for each in (_default, *_others) if each.stream_id == stream_id]
    set_stream(found[0] if found else None)


def synchronize_all() -> None:
    for each in (_default, *_others):
        each.synchronize()


class StreamContext:
    """``with torch.musa.stream(s)``."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: Stream | None = None

    def __enter__(self) -> None:
        self._before = _current
        set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_stream(self._before)


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)
