"""Stand-in of mthreads-ml-py: a driver with two cards whose failures a test sets in ``state``.

Like the real binding it has NVML look-alikes that answer 0; whoever calls one ends the test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MTML_ERROR_NOT_SUPPORTED = 4
MTML_ERROR_UNINITIALIZED = 666
MTML_ERROR_GPU_IS_LOST = 669


class MTMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({4: "Not Supported", 666: "Uninitialized", 669: "Gpu Is Lost"}[value])
        self.value = value


state: dict[str, Any] = {}


def reset() -> None:
    state.clear()
    state.update(
        started_in=None, calls=[], no_library=False, errors={}, open=0, names=["MTT S4000", "MTT S80"]
    )


reset()


def mtmlLibraryInit() -> None:
    state["calls"].append("start")
    if state["no_library"]:
        raise OSError("Failed to load MTML library on Linux. Tried: libmtml.so.2, libmtml.so\nLoad errors:")
    state["started_in"] = os.getpid()


def mtmlLibraryShutDown() -> None:
    state["calls"].append("stop")
    state["started_in"] = None


def _check(name: str) -> None:
    if state["started_in"] != os.getpid():
        raise MTMLError(MTML_ERROR_UNINITIALIZED)
    if name in state["errors"]:
        raise MTMLError(state["errors"][name])


def mtmlLibraryCountDevice() -> int:
    _check("count")
    return len(state["names"])


def mtmlLibraryInitDeviceByIndex(index: int) -> int:
    _check("device")
    state["open"] += 1
    return index


def mtmlLibraryFreeDevice(device: int) -> None:
    state["open"] -= 1


def mtmlDeviceGetUUID(device: int) -> str:
    return ("3f2e", "9a1b")[device] + "0000-1111-2222-3333-444444444444"


def mtmlDeviceGetName(device: int) -> str:
    _check("name")
    return state["names"][device]


def mtmlDeviceGetPowerUsage(device: int) -> int:
    _check("power")
    return 187_500


@contextmanager
def _context(device: int) -> Iterator[int]:
    state["open"] += 1
    try:
        yield device
    finally:
        state["open"] -= 1


mtmlGpuContext = mtmlMemoryContext = _context


def mtmlGpuGetUtilization(gpu: int) -> int:
    _check("utilization")
    return 12


def mtmlGpuGetTemperature(gpu: int) -> int:
    _check("temperature")
    return 55


def mtmlGpuGetClock(gpu: int) -> int:
    _check("clock")
    return 1750


def mtmlMemoryGetUtilization(memory: int) -> int:
    _check("memory_utilization")
    return 3


def mtmlMemoryGetUsed(memory: int) -> int:
    _check("memory")
    return 2**30


def mtmlMemoryGetTotal(memory: int) -> int:
    _check("memory")
    return (48, 16)[memory] * 2**30


def mtmlMemoryGetClock(memory: int) -> int:
    _check("memory_clock")
    return 8000


def __getattr__(name: str) -> Any:
    assert not name.startswith("nvml"), f"{name} of the real binding answers 0 for what MTML cannot tell"
    raise AttributeError(name)
