"""Telemetry of a device or the host behind one interface: ``host()``, ``nvml(index)``, ``mtml(index)``.

Nothing here raises because a value cannot be read, and importing it needs no driver library.

readings            a reading: each field a value or the reason why there is none
host_reader         the host, from /proc and /sys
nvml_reader         NVIDIA GPUs through NVML
mtml_reader         Moore Threads GPUs through MTML
management_library  a vendor's management library, loaded when first asked
visible_devices     physical device of an index, from the vendor's environment variable
"""

from __future__ import annotations

from mt_megatron.backends.telemetry.readings import Reading, Unsupported, Value, number

__all__ = ["Reading", "Unsupported", "Value", "host", "mtml", "number", "nvml"]


# Imported when first asked: patch() needs none. The host's utilization counts from its import.


def host() -> Reading:
    """See ``host_reader.host``."""
    from mt_megatron.backends.telemetry import host_reader

    return host_reader.host()


def mtml(index: int = 0) -> Reading:
    """See ``mtml_reader.read``."""
    from mt_megatron.backends.telemetry.mtml_reader import read

    return read(index)


def nvml(index: int = 0, *, uuid: str | None = None) -> Reading:
    """See ``nvml_reader.read``."""
    from mt_megatron.backends.telemetry.nvml_reader import read

    return read(index, uuid=uuid)
