"""The host's own telemetry, from /proc and /sys by way of psutil."""

from __future__ import annotations

import os
import threading
from typing import Any

import psutil

from mt_megatron.backends.telemetry.readings import Reading, Unsupported, Value
from mt_megatron.host import limits

_NONE = Unsupported("/proc and /sys do not tell it")
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal")


def _busy_and_total() -> tuple[float, float]:
    times = psutil.cpu_times()
    # guest time is part of user time already, and iowait is time without work.
    total = sum(getattr(times, name) for name in times._fields if not name.startswith("guest"))
    return total - times.idle - getattr(times, "iowait", 0.0), total


class _Utilization:
    """Busy share between two readings; the first reading counts from the import of this module.

    psutil's own ``cpu_percent`` answers a first call from another thread with 0.0.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._before = _busy_and_total()
        self._last: Value = Unsupported("no time has passed since the first look")

    def read(self) -> Value:
        with self._lock:
            busy, total = _busy_and_total()
            elapsed = total - self._before[1]
            if elapsed > 0:
                share = (busy - self._before[0]) / elapsed
                self._before = busy, total
                self._last = min(100.0, max(0.0, 100.0 * share))
            # The kernel counts in hundredths of a second: within one, the last answer stands.
            return self._last


_utilization = _Utilization()
# A child counts from its own start, and may have inherited a lock that nobody releases.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_utilization.reset)


def _temperature() -> Value:
    read: Any = getattr(psutil, "sensors_temperatures", None)
    found = read() if read is not None else {}
    values = [entry.current for name in _SENSORS for entry in found.get(name, ()) if entry.current]
    return max(values) if values else Unsupported("/sys/class/hwmon has no processor sensor")


def _clock() -> Value:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError) as error:
        return Unsupported(f"no processor frequency: {error}")
    # Some virtual machines report 0.
    return float(frequency.current) if frequency and frequency.current else _NONE


def host() -> Reading:
    """The host as a whole: utilization of all cores since the last reading, memory, heat, clock."""
    memory = limits.memory()
    return Reading(
        source="host",
        device=_NONE,
        utilization=_utilization.read(),
        memory_utilization=_NONE,
        memory_used=memory.total - memory.available,
        memory_total=memory.total,
        temperature=_temperature(),
        power=_NONE,
        power_limit=_NONE,
        energy=_NONE,
        clock=_clock(),
        memory_clock=_NONE,
        throttle_reasons=_NONE,
        link_sent=_NONE,
        link_received=_NONE,
    )
