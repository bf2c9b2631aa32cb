"""Stand-in of nvidia-ml-py: a driver with two GPUs whose answers and failures a test sets in ``state``."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_GPU_IS_LOST = 15
NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

_TEXT = {1: "Uninitialized", 3: "Not Supported", 9: "Driver Not Loaded", 12: "NVML Shared Library Not Found"}
_TEXT[15] = "GPU is lost"


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(_TEXT[value])
        self.value = value


state: dict[str, Any] = {}


def reset() -> None:
    state.clear()
    state.update(
        started_in=None,
        calls=[],
        start_error=None,
        errors={},
        names=["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"],
        power=350_000,
        used=7 * 2**30,
        energy=123_456,
        reasons=0x1 | 0x4 | 0x40,
        link_result=0,
    )


reset()


def nvmlInit() -> None:
    state["calls"].append("start")
    if state["start_error"] is not None:
        raise NVMLError(state["start_error"])
    state["started_in"] = os.getpid()


def nvmlShutdown() -> None:
    state["calls"].append("stop")
    state["started_in"] = None


def _check(name: str) -> None:
    if state["started_in"] != os.getpid():
        raise NVMLError(NVML_ERROR_UNINITIALIZED)
    if name in state["errors"]:
        raise NVMLError(state["errors"][name])


def nvmlDeviceGetCount() -> int:
    _check("count")
    return len(state["names"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    _check("handle")
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{'ab'[handle]}{handle}000000-1111-2222-3333-444444444444"


def nvmlDeviceGetName(handle: int) -> str | bytes:
    _check("name")
    return state["names"][handle].encode() if handle else state["names"][handle]


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:
    _check("utilization")
    return SimpleNamespace(gpu=0 if handle else 93, memory=40)


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:
    _check("memory")
    return SimpleNamespace(used=state["used"], total=80 * 2**30)


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    _check("temperature")
    assert sensor == NVML_TEMPERATURE_GPU
    return 61


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    _check("power")
    return state["power"]


def nvmlDeviceGetEnforcedPowerLimit(handle: int) -> int:
    _check("limit")
    return 700_000


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:
    _check("energy")
    return state["energy"]


def nvmlDeviceGetClockInfo(handle: int, kind: int) -> int:
    _check("clock")
    return {NVML_CLOCK_SM: 1980, NVML_CLOCK_MEM: 2619}[kind]


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:
    _check("reasons")
    return state["reasons"]


def nvmlDeviceGetFieldValues(handle: int, fields: list[tuple[int, int]]) -> list[Any]:
    _check("fields")
    assert all(scope == 2**32 - 1 for _, scope in fields)
    return [
        SimpleNamespace(nvmlReturn=state["link_result"], value=SimpleNamespace(ullVal=field))
        for field, _ in fields
    ]


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    _check("capability")
    return (9, 0)
