"""Host facts beside the spans: what kept this process from running, and how its device fares.

Counters named in ``records.COUNTERS``. A fact that this system does not tell is left out, never a zero.
"""

from __future__ import annotations

import gc
import logging
import math
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

from mt_megatron.backends.telemetry_types import Reading, Unsupported, Value

from .linux_counters import CgroupThrottling, RunQueue, StealTime

logger = logging.getLogger("mt_megatron")

Telemetry = Callable[[], Reading]
Counter = Callable[[str, float], None]

TELEMETRY_SECONDS = 10.0
_STEAL_SECONDS = 2.0
PAUSE_NS = 50_000_000
"""A thread that wakes later than this is worth a look at why."""

GC_SPAN_NS = 1_000_000
"""Garbage collections as long as this get a span; all are in the counter."""


class HostFacts:
    """Facts of this process; all methods but ``start`` and ``close`` belong to the background thread."""

    def __init__(
        self,
        counter: Counter,
        *,
        telemetry: Telemetry | None = None,
        samples: dict[str, Callable[[], float | None]] | None = None,
    ) -> None:
        """``counter(name, value)`` takes a device's values, which a thread of their own reads. ``samples``:
        counter name -> what reads it; more may come, and one that raises is removed."""
        self._samples = {} if samples is None else samples
        self._counter = counter
        self._telemetry = telemetry
        self._run_queue = RunQueue()
        self._throttling = CgroupThrottling()
        self._steal = StealTime()
        self._steal_at = 0.0
        self._collector = GcPauses()
        self._stopped = threading.Event()
        self._ran = 0
        self._waited: int | None = None

    def start(self) -> None:
        """Hear of garbage collections, read telemetry."""
        self._collector.start()
        if self._telemetry is not None:
            threading.Thread(target=self._read_telemetry, name="scan-telemetry", daemon=True).start()

    def close(self) -> None:
        """Stop both."""
        self._collector.close()
        self._stopped.set()

    def hear_no_collections(self) -> None:
        """For a forked child, in which nothing may touch a lock that another thread may have held."""
        self._collector.close()

    def release(self) -> None:
        """Close what the background thread reads from."""
        self._run_queue.close()
        self._throttling.close()
        self._steal.close()

    def gc_pauses(self) -> list[tuple[str, int, int, int]]:
        """Long collections since the last call: ``gc``, begin, end (ns), thread."""
        return self._collector.take()

    def pause(self, planned: int, woke: int) -> str | None:
        """``stopped`` when this process stood still from ``planned`` to ``woke``; to be asked at each beat.

        It stood still when the calling thread was late although the process did not run and the thread
        did not wait for a processor: in a stopped process both counts rest.
        """
        if self._waited is None:
            self._waited = self._run_queue.own_wait_ns() or 0
        now = time.process_time_ns()
        ran, self._ran = now - self._ran, now
        late = woke - planned
        if late < PAUSE_NS or not self._run_queue.known or ran >= late // 2:
            return None
        # The thread does little else than sleep: what it has waited since the last sample, it waited now.
        waited = (self._run_queue.own_wait_ns() or 0) - self._waited
        return "stopped" if waited < late // 2 else None

    def sample(self) -> list[tuple[str, float]]:
        """Names and values now."""
        if self._waited is not None:
            self._waited = self._run_queue.own_wait_ns() or 0
        usage = resource.getrusage(resource.RUSAGE_SELF)
        found: list[tuple[str, float | None]] = [
            ("process_cpu_ns", time.process_time_ns()),
            ("run_queue_wait_ns", self._run_queue.wait_ns()),
            ("major_faults", usage.ru_majflt),
            ("minor_faults", usage.ru_minflt),
            ("voluntary_switches", usage.ru_nvcsw),
            ("involuntary_switches", usage.ru_nivcsw),
            ("gc_pause_ns", self._collector.total_ns),
            ("throttled_ns", self._throttling.throttled_ns()),
        ]
        now = time.monotonic()
        if now >= self._steal_at:
            self._steal_at = now + _STEAL_SECONDS
            found.append(("steal_fraction", self._steal.fraction()))
        found += [(name, self._called(name, read)) for name, read in tuple(self._samples.items())]
        return [(name, float(value)) for name, value in found if value is not None]

    def _called(self, name: str, read: Callable[[], float | None]) -> float | None:
        try:
            value = read()
            return None if value is None else float(value)
        except Exception as error:  # noqa: BLE001 - tracing never ends training
            del self._samples[name]
            logger.warning("tracing goes on without %s: %s: %s", name, type(error).__name__, error)
            return None

    def _read_telemetry(self) -> None:
        """In a thread of its own: a driver that does not answer must not hold up the trace."""
        read = self._telemetry
        assert read is not None
        try:
            while True:
                for name, value in counters_of(read()):
                    self._counter(name, value)
                if self._stopped.wait(TELEMETRY_SECONDS):
                    return
        except Exception as error:  # noqa: BLE001 - tracing never ends training
            logger.warning("tracing goes on without telemetry: %s: %s", type(error).__name__, error)


def counters_of(reading: Reading) -> list[tuple[str, float]]:
    """What ``reading`` tells, under the names of ``records.COUNTERS``."""
    values: list[tuple[str, Value]] = [
        ("power_w", reading.power),
        ("temperature_c", reading.temperature),
        ("clock_mhz", reading.clock),
        ("utilization_percent", reading.utilization),
        ("memory_bytes", reading.memory_used),
    ]
    found = [(name, float(value)) for name, value in values if not isinstance(value, Unsupported)]
    if not isinstance(reading.throttle_reasons, Unsupported):
        found.append(("throttled", float(bool(reading.throttle_reasons))))
    return [(name, value) for name, value in found if not math.isnan(value)]


class GcPauses:
    """Time within Python's garbage collector, and each long collection as a span."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._began = 0
        self._spans: list[tuple[str, int, int, int]] = []

    def start(self) -> None:
        """Hear of every collection."""
        gc.callbacks.append(self._hear)

    def close(self) -> None:
        """Hear of none."""
        if self._hear in gc.callbacks:
            gc.callbacks.remove(self._hear)

    def take(self) -> list[tuple[str, int, int, int]]:
        """Long collections since the last call."""
        taken, self._spans = self._spans, []
        return taken

    def _hear(self, phase: str, info: dict[str, Any]) -> None:
        now = time.perf_counter_ns()
        if phase == "start":
            self._began = now
        elif self._began:
            self.total_ns += now - self._began
            if now - self._began >= GC_SPAN_NS:
                self._spans.append(("gc", self._began, now, threading.get_ident()))
            self._began = 0
