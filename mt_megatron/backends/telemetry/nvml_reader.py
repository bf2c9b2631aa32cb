"""NVIDIA GPUs through NVML, by its Python binding ``nvidia-ml-py`` (module ``pynvml``)."""

from __future__ import annotations

import os
from typing import Any

from mt_megatron.backends.telemetry.management_library import ManagementLibrary
from mt_megatron.backends.telemetry.readings import Reading, Unsupported, Value
from mt_megatron.backends.telemetry.visible_devices import physical_index

_library = ManagementLibrary(
    module="pynvml",
    package="nvidia-ml-py",
    start="nvmlInit",
    stop="nvmlShutdown",
    uninitialized="NVML_ERROR_UNINITIALIZED",
)

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons, nvml.h. That clocks follow an application's own
# setting or that nothing runs holds nothing back, so bits 0x1, 0x2 and 0x100 are left out.
_REASONS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_ALL_LINKS = 2**32 - 1
"""The scope of a field value that means every link together, nvml.h."""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _devices(nvml: Any) -> list[tuple[str, str]]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return [(_text(nvml.nvmlDeviceGetUUID(each)), _text(nvml.nvmlDeviceGetName(each))) for each in handles]


def _physical(index: int, uuid: str | None) -> int | Unsupported:
    devices = _library.ask(_devices)
    if isinstance(devices, Unsupported):
        return devices
    uuids = [each for each, _ in devices]
    if uuid is not None:
        wanted = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        found = next((i for i, each in enumerate(uuids) if each.lower() == wanted.lower()), None)
        return Unsupported(f"NVML has no device {wanted}") if found is None else found
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    by_number = value is None or any(token.strip().isdecimal() for token in value.split(","))
    same = len({name for _, name in devices}) <= 1
    if by_number and not same and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return Unsupported(
            "CUDA numbers unlike GPUs by speed and NVML by bus: set CUDA_DEVICE_ORDER=PCI_BUS_ID, "
            "or name devices by UUID"
        )
    return physical_index(index, "CUDA_VISIBLE_DEVICES", value, uuids)


def read(index: int = 0, *, uuid: str | None = None) -> Reading:
    """The ``index``-th GPU that CUDA_VISIBLE_DEVICES leaves to this process, or the one called ``uuid``."""
    physical = _physical(index, uuid)
    if isinstance(physical, Unsupported):
        return Reading.nothing("nvml", physical.reason)
    handle = _library.ask(lambda nvml: nvml.nvmlDeviceGetHandleByIndex(physical))
    if isinstance(handle, Unsupported):
        return Reading.nothing("nvml", handle.reason)

    def value(name: str, *arguments: Any, scale: float = 1) -> Value:
        return _library.value(lambda nvml: getattr(nvml, name)(handle, *arguments), scale)

    def part(name: str, attribute: str) -> Value:
        return _library.value(lambda nvml: getattr(getattr(nvml, name)(handle), attribute))

    def clock(kind: str) -> Value:
        return _library.value(lambda nvml: nvml.nvmlDeviceGetClockInfo(handle, getattr(nvml, kind)))

    return Reading(
        source="nvml",
        device=_library.ask(lambda nvml: _text(nvml.nvmlDeviceGetName(handle))),
        utilization=part("nvmlDeviceGetUtilizationRates", "gpu"),
        memory_utilization=part("nvmlDeviceGetUtilizationRates", "memory"),
        memory_used=part("nvmlDeviceGetMemoryInfo", "used"),
        memory_total=part("nvmlDeviceGetMemoryInfo", "total"),
        temperature=_library.value(
            lambda nvml: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
        power=value("nvmlDeviceGetPowerUsage", scale=1e-3),
        power_limit=value("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3),
        energy=value("nvmlDeviceGetTotalEnergyConsumption", scale=1e-3),
        clock=clock("NVML_CLOCK_SM"),
        memory_clock=clock("NVML_CLOCK_MEM"),
        throttle_reasons=_library.ask(lambda nvml: _reasons(nvml, handle)),
        link_sent=_library.value(lambda nvml: _link(nvml, handle, "TX")),
        link_received=_library.value(lambda nvml: _link(nvml, handle, "RX")),
    )


def _reasons(nvml: Any, handle: Any) -> tuple[str, ...]:
    bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


def _link(nvml: Any, handle: Any, direction: str) -> int:
    field = getattr(nvml, f"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{direction}")
    (found,) = nvml.nvmlDeviceGetFieldValues(handle, [(field, _ALL_LINKS)])
    # Each field carries a result of its own: without links the call succeeds and the field does not.
    if found.nvmlReturn != 0:
        raise nvml.NVMLError(found.nvmlReturn)
    return int(found.value.ullVal) * 1024


def capabilities() -> list[tuple[str, tuple[int, int]]] | Unsupported:
    """Name and compute capability of every GPU in this machine, visible to this process or not."""

    def ask(nvml: Any) -> list[tuple[str, tuple[int, int]]]:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [
            (_text(nvml.nvmlDeviceGetName(each)), tuple(nvml.nvmlDeviceGetCudaComputeCapability(each)))
            for each in handles
        ]

    return _library.ask(ask)
