"""Host facts beside the spans: what kept this process from running, and how its device fares.

Counters named in ``records.COUNTERS``. A fact that this system does not tell is left out, never a zero.

Linux tells of time that a process did not get: run queues, steal, its control group's quota. Every reader
answers None where the system does not tell it. Files stay open: a reading is one system call.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mt_megatron.backends.telemetry.readings import Reading, Unsupported, Value
from mt_megatron.backends.threads import RankThread

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
            RankThread(target=self._read_telemetry, name="scan-telemetry", daemon=True).start()

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


_TASKS = "/proc/self/task"
_FOLLOWED = 8
_WORTH = 0.005
"""Of what the busiest thread ran: who ran less is not followed."""

_CHOOSE_SECONDS = 15.0
_MOVE_SECONDS = 4.0
"""A process is hardly ever moved to another group while it runs."""


class RunQueue:
    """Time that threads of this process were ready to run and had no processor (``schedstat``).

    Reading all threads of a process that trains would cost milliseconds: the busiest are followed, and
    chosen anew every few seconds.
    """

    def __init__(self, tasks: str = _TASKS) -> None:
        self._tasks = tasks
        self._files: dict[str, int] = {}
        self._waited: dict[str, int] = {}
        self._ran: dict[str, int] = {}
        self._total = 0
        self._choose_at = 0.0
        self._own: int | None = None
        self._own_thread = 0
        self.known = os.path.exists(f"{tasks}/{os.getpid()}/schedstat") or tasks != _TASKS
        """Whether this system counts it."""

    def wait_ns(self) -> int | None:
        """Nanoseconds waited since the first call, over the threads that were followed meanwhile."""
        if not self.known:
            return None
        if time.monotonic() >= self._choose_at:
            self._choose()
        for task, file in tuple(self._files.items()):
            found = _schedstat(file)
            if found is None:
                self._forget(task)
                continue
            self._total += found[1] - self._waited[task]
            self._waited[task] = found[1]
        return self._total

    def own_wait_ns(self) -> int | None:
        """What the calling thread waited since it began."""
        if self._own_thread != threading.get_ident() and self.known:
            if self._own is not None:
                os.close(self._own)
                self._own = None
            with contextlib.suppress(OSError):
                self._own = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                self._own_thread = threading.get_ident()
        found = None if self._own is None else _schedstat(self._own)
        return None if found is None else found[1]

    def close(self) -> None:
        """Close the files."""
        for task in tuple(self._files):
            self._forget(task)
        if self._own is not None:
            os.close(self._own)
            self._own = None
            self._own_thread = 0

    def _choose(self) -> None:
        """Follow those that ran most since the last choice."""
        self._choose_at = time.monotonic() + _CHOOSE_SECONDS
        found: dict[str, tuple[int, int]] = {}
        with contextlib.suppress(OSError):
            for task in os.listdir(self._tasks):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    words = Path(self._tasks, task, "schedstat").read_bytes().split()
                    found[task] = int(words[0]), int(words[1])
        ran = {task: now - self._ran.get(task, 0) for task, (now, _) in found.items()}
        least = _WORTH * max(ran.values(), default=0)
        busiest = sorted(ran, key=ran.__getitem__, reverse=True)[:_FOLLOWED]
        busy = [task for task in busiest if ran[task] >= least]
        self._ran = {task: now for task, (now, _) in found.items()}
        for task in self._files.keys() - set(busy):
            self._total += max(0, found[task][1] - self._waited[task]) if task in found else 0
            self._forget(task)
        for task in busy:
            if task not in self._files:
                with contextlib.suppress(OSError):
                    self._files[task] = os.open(f"{self._tasks}/{task}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                    self._waited[task] = found[task][1]

    def _forget(self, task: str) -> None:
        os.close(self._files.pop(task))
        del self._waited[task]


class StealTime:
    """Share of this machine's processor time that its hypervisor gave to others."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = _Kept(stat)
        self._before: tuple[int, int] | None = None

    def fraction(self) -> float | None:
        """0 to 1 since the last call; None at the first."""
        text = self._stat.read(512)
        try:
            times = [int(word) for word in (text or b"").partition(b"\n")[0].split()[1:9]]
        except ValueError:
            return None
        if len(times) < 8:
            return None
        now = times[7], sum(times)
        before, self._before = self._before, now
        if before is None or now[1] <= before[1]:
            return None
        return (now[0] - before[0]) / (now[1] - before[1])

    def close(self) -> None:
        """Close the file."""
        self._stat.close()


class CgroupThrottling:
    """Time for which the quota of this process's control group stopped it (version 1 and 2)."""

    def __init__(
        self,
        root: Path = Path("/sys/fs/cgroup"),
        own: Path = Path("/proc/self/cgroup"),
        ask_seconds: float = _MOVE_SECONDS,
    ) -> None:
        """``ask_seconds``: how often to look which group this process is in."""
        self._every = ask_seconds
        self._root = root
        self._own = _Kept(own)
        self._groups: bytes | None = None
        self._ask_at = 0.0
        self._stat: _Kept | None = None
        self._before: int | None = None
        self._total = 0

    def throttled_ns(self) -> int | None:
        """Nanoseconds since the first call, also over a move to another group; None without a group."""
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + self._every
            groups = self._own.read()
            if groups != self._groups or self._stat is None:
                self._groups = groups
                self._move(None if groups is None else self._find(groups.decode(errors="replace")))
        text = None if self._stat is None else self._stat.read()
        try:
            throttled = None if text is None else _throttled(text)
        except (ValueError, IndexError):
            return None
        if throttled is None:
            return None
        if self._before is not None:
            self._total += max(0, throttled - self._before)
        self._before = throttled
        return self._total

    def close(self) -> None:
        """Close the files."""
        self._own.close()
        self._move(None)

    def _move(self, stat: Path | None) -> None:
        if self._stat is not None:
            self._stat.close()
        self._stat = None if stat is None else _Kept(stat)
        self._before = None

    def _find(self, groups: str) -> Path | None:
        for line in sorted(groups.splitlines(), reverse=True):
            _, controllers, path = line.split(":", 2)
            below = path.lstrip("/")
            places = [self._root / below] if controllers == "" else []
            if "cpu" in controllers.split(","):
                places = [self._root / controllers / below, self._root / "cpu" / below]
            for place in places:
                if (place / "cpu.stat").exists():
                    return place / "cpu.stat"
        return None


class _Kept:
    """A file that stays open and is read again and again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def read(self, most: int = 4096) -> bytes | None:
        """Its first bytes now; None when it cannot be read."""
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._file, most, 0)
        except OSError:
            self.close()
            return None

    def close(self) -> None:
        """Close it; the next ``read`` opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _throttled(text: bytes) -> int | None:
    for name, unit in ((b"throttled_usec ", 1_000), (b"throttled_time ", 1)):
        _, found, rest = text.partition(name)
        if found:
            return int(rest.split(None, 1)[0]) * unit
    return None


def _schedstat(file: int) -> tuple[int, int] | None:
    """Nanoseconds run and waited; None when the thread has ended."""
    try:
        ran, waited = os.pread(file, 128, 0).split()[:2]
        return int(ran), int(waited)
    except (OSError, ValueError):
        return None
