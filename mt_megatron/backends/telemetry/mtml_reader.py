"""Moore Threads GPUs through MTML, by its Python binding ``mthreads-ml-py`` (module ``pymtml``).

Only the ``mtml*`` functions: the binding's NVML look-alikes answer 0 for what MTML cannot tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from mt_megatron.backends.telemetry.management_library import ManagementLibrary
from mt_megatron.backends.telemetry.readings import Reading, Unsupported, Value
from mt_megatron.backends.telemetry.visible_devices import physical_index

_library = ManagementLibrary(
    module="pymtml",
    package="mthreads-ml-py",
    start="mtmlLibraryInit",
    stop="mtmlLibraryShutDown",
    uninitialized="MTML_ERROR_UNINITIALIZED",
)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _of_each(mtml: Any, function: Callable[[Any], Any]) -> list[str]:
    found = []
    for index in range(mtml.mtmlLibraryCountDevice()):
        device = mtml.mtmlLibraryInitDeviceByIndex(index)
        try:
            found.append(_text(function(device)))
        finally:
            mtml.mtmlLibraryFreeDevice(device)
    return found


def read(index: int = 0) -> Reading:
    """The ``index``-th GPU that MUSA_VISIBLE_DEVICES leaves to this process."""
    uuids = _library.ask(lambda mtml: _of_each(mtml, mtml.mtmlDeviceGetUUID))
    if isinstance(uuids, Unsupported):
        return Reading.nothing("mtml", uuids.reason)
    visible = os.environ.get("MUSA_VISIBLE_DEVICES")
    physical = physical_index(index, "MUSA_VISIBLE_DEVICES", visible, uuids)
    if isinstance(physical, Unsupported):
        return Reading.nothing("mtml", physical.reason)
    device = _library.ask(lambda mtml: mtml.mtmlLibraryInitDeviceByIndex(physical))
    if isinstance(device, Unsupported):
        return Reading.nothing("mtml", device.reason)
    try:
        return _of(device)
    finally:
        _library.ask(lambda mtml: mtml.mtmlLibraryFreeDevice(device))


def _of(device: Any) -> Reading:
    def gpu(name: str) -> Value:
        def ask(mtml: Any) -> Any:
            with mtml.mtmlGpuContext(device) as handle:
                return getattr(mtml, name)(handle)

        return _library.value(ask)

    def memory(name: str) -> Value:
        def ask(mtml: Any) -> Any:
            with mtml.mtmlMemoryContext(device) as handle:
                return getattr(mtml, name)(handle)

        return _library.value(ask)

    def lacks(what: str) -> Unsupported:
        return Unsupported(f"MTML has no {what}")

    return Reading(
        source="mtml",
        device=_library.ask(lambda mtml: _text(mtml.mtmlDeviceGetName(device))),
        utilization=gpu("mtmlGpuGetUtilization"),
        memory_utilization=memory("mtmlMemoryGetUtilization"),
        memory_used=memory("mtmlMemoryGetUsed"),
        memory_total=memory("mtmlMemoryGetTotal"),
        temperature=gpu("mtmlGpuGetTemperature"),
        power=_library.value(lambda mtml: mtml.mtmlDeviceGetPowerUsage(device), scale=1e-3),
        power_limit=lacks("power limit"),
        energy=lacks("energy counter"),
        clock=gpu("mtmlGpuGetClock"),
        memory_clock=memory("mtmlMemoryGetClock"),
        throttle_reasons=lacks("throttle reasons"),
        link_sent=lacks("link counters"),
        link_received=lacks("link counters"),
    )


def names() -> list[str] | Unsupported:
    """Name of every GPU in this machine, visible to this process or not."""

    return _library.ask(lambda mtml: _of_each(mtml, mtml.mtmlDeviceGetName))
