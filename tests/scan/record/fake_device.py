"""A device that works behind the host, with a clock that drifts: ``torch.cuda.Event`` and ``Stream`` on it.

Each operation takes as long as the test says and begins when the one before on its stream has ended. Reading
an event before the device has got to it is an error, as on a real one.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

current: Device | None = None


class Device:
    """What runs on streams. Times are nanoseconds of the host's clock unless named otherwise."""

    def __init__(self, *, drift_ppm: float = 0.0, offset_ns: int = 0) -> None:
        self.drift_ppm = drift_ppm
        self.offset_ns = offset_ns
        self.default = Stream()
        self.hangs = False
        self.recorded = 0

    def work(self, nanoseconds: int) -> None:
        """Queue an operation on the default stream."""
        self.default.free_at = max(self.default.free_at, time.perf_counter_ns()) + nanoseconds

    def clock(self, host_ns: int) -> float:
        """The device's clock, ns, at a moment of the host's."""
        return host_ns * (1 + self.drift_ppm * 1e-6) + self.offset_ns


class Stream:
    """A queue."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.free_at = 0


class Event:
    """A mark in a queue."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        assert current is not None and enable_timing
        self._device = current
        self._at: int | None = None
        self._hangs = False

    def record(self, stream: Stream | None = None) -> None:
        self._device.recorded += 1
        queue = self._device.default if stream is None else stream
        self._at = max(queue.free_at, time.perf_counter_ns())
        # Other streams go on where one hangs.
        self._hangs = self._device.hangs and stream is None

    @property
    def passed_ns(self) -> int:
        """When the device gets there."""
        assert self._at is not None
        return self._at

    def query(self) -> bool:
        return not self._hangs and time.perf_counter_ns() >= self.passed_ns

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for the device")

    def elapsed_time(self, end_event: Event) -> float:
        for event in (self, end_event):
            if not event.query():
                raise RuntimeError("device not ready (an event was read before it was done)")
        clock = self._device.clock
        # As coarse as torch's.
        return float(np.float32((clock(end_event.passed_ns) - clock(self.passed_ns)) / 1e6))
