"""Telemetry of a device or the host behind one interface: ``host()``, ``nvml(index)``, ``mtml(index)``.

Nothing here raises because something cannot be told, and importing it needs no driver library.
"""

from __future__ import annotations

from .telemetry_host import host
from .telemetry_mtml import read as mtml
from .telemetry_nvml import read as nvml
from .telemetry_types import Reading, Unsupported, Value, number

__all__ = ["Reading", "Unsupported", "Value", "host", "mtml", "number", "nvml"]
