"""What a telemetry reading is: each field a value or the reason why there is none, never a stand-in zero."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Unsupported:
    """A field that nothing here can tell. False in a condition, as a missing value should be."""

    reason: str

    def __bool__(self) -> bool:
        return False


Value = float | int | Unsupported
"""A measured number, or why there is none. Test with ``isinstance``: a measured 0 is false as well."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One device, or the host, at one moment."""

    source: str
    """``nvml``, ``mtml`` or ``host``."""

    device: str | Unsupported
    """Marketing name."""

    utilization: Value
    """Percent of the last sample period in which the device was busy; on the host of all its cores."""

    memory_utilization: Value
    """Percent of the last sample period in which device memory was read or written."""

    memory_used: Value
    """Bytes."""

    memory_total: Value
    """Bytes."""

    temperature: Value
    """Degrees Celsius."""

    power: Value
    """Watts."""

    power_limit: Value
    """Watts."""

    energy: Value
    """Joules since the driver was loaded."""

    clock: Value
    """MHz, of the cores."""

    memory_clock: Value
    """MHz."""

    throttle_reasons: tuple[str, ...] | Unsupported
    """Why the clock is below its highest; an empty tuple says that it is not held back."""

    link_sent: Value
    """Bytes sent over NVLink, all links together."""

    link_received: Value
    """Bytes received over NVLink, all links together."""

    @classmethod
    def nothing(cls, source: str, reason: str) -> Reading:
        """A reading without any value, all for the same ``reason``."""
        missing = Unsupported(reason)
        names = (field.name for field in fields(cls) if field.name != "source")
        return cls(source=source, **dict.fromkeys(names, missing))

    def plain(self) -> dict[str, Any]:
        """As JSON-able data: a value as it is, a missing one as ``{"unsupported": reason}``."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Unsupported):
                value = {"unsupported": value.reason}
            found[field.name] = list(value) if isinstance(value, tuple) else value
        return found


def number(value: Value) -> float:
    """``value`` as a float, NaN when unsupported: for callers that can only take numbers."""
    return math.nan if isinstance(value, Unsupported) else float(value)
