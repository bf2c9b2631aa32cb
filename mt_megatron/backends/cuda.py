"""NVIDIA GPUs with NCCL: Megatron-Core already speaks ``torch.cuda``, so nothing is redirected."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import BackendError
from . import telemetry
from .base import TimedEvent

# Dense peak FLOP/s of NVIDIA's data sheets, by a part of the device's name; the first match
# counts. A device or dtype that is not here is unknown, never guessed: nor is an NVL board, which has
# another clock, or a part of a GPU (MIG), whose names contain these.
_PEAKS: tuple[tuple[str, dict[torch.dtype, float]], ...] = tuple(
    (
        part,
        {
            torch.bfloat16: half * 1e12,
            torch.float16: half * 1e12,
            torch.float32: single * 1e12,
            **({torch.float8_e4m3fn: eight * 1e12, torch.float8_e5m2: eight * 1e12} if eight else {}),
        },
    )
    for part, half, single, eight in (
        ("H200", 989.5, 67.0, 1979.0),
        ("H100 PCIe", 756.0, 51.0, 1513.0),
        ("H100", 989.5, 67.0, 1979.0),
        ("A100", 312.0, 19.5, 0.0),
    )
)


_DRIVER = "libcuda.so.1"


def _driver_problem() -> str | None:
    """Reason for which the driver does not serve this torch, which NVML does not tell; None without one. The
    driver's version is asked for without beginning to use CUDA. A driver of the same major version serves
    (NVIDIA: CUDA Compatibility, minor version compatibility)."""
    built = torch.version.cuda
    if built is None:  # ROCm has no such library
        return None
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL(_DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        return f"the library of NVIDIA's driver cannot be used ({error})"
    if status:
        return f"{_DRIVER} gives no version (CUDA driver error {status}): it is not the driver's own library"
    major, minor = version.value // 1000, version.value % 1000 // 10
    if major < int(built.split(".")[0]):
        return (
            f"the driver serves CUDA {major}.{minor}, this torch was built for CUDA {built}; update the "
            f"driver, or install a torch for CUDA {major}"
        )
    return None


class CudaBackend:
    """One NVIDIA GPU per local rank."""

    name = "cuda"
    device_type = "cuda"
    collective = "nccl"
    needs_redirection = False

    def available(self) -> tuple[bool, str]:
        if not torch.backends.cuda.is_built():
            return False, "this torch was built without CUDA"
        # The number alone, which torch takes from NVML: is_available() and a device's name begin to use CUDA,
        # and then no rank that this process forks can use it.
        count = torch.cuda.device_count()
        if not count:
            return False, "torch has CUDA, but no device or driver was found"
        problem = _driver_problem()
        if problem is not None:
            return False, problem
        return True, f"{count} CUDA device(s), NCCL"

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def set_device(self, index: int) -> None:
        if not 0 <= index < torch.cuda.device_count():
            raise BackendError(
                f"invalid device index {index}: {torch.cuda.device_count()} CUDA device(s) are visible; "
                "start fewer processes per node or make more devices visible (CUDA_VISIBLE_DEVICES)"
            )
        torch.cuda.set_device(index)

    def device(self, index: int) -> torch.device:
        return torch.device("cuda", index)

    def device_name(self, index: int) -> str:
        return torch.cuda.get_device_name(index)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def memory_allocated(self) -> int | None:
        # memory_allocated() makes a sorted list of all statistics first.
        found = torch.cuda.memory_stats_as_nested_dict().get("allocated_bytes", {}).get("all", {})
        return int(found.get("current", 0))

    def max_memory_allocated(self) -> int | None:
        return torch.cuda.max_memory_allocated()

    def total_memory(self) -> int | None:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)

    def telemetry(self, index: int) -> telemetry.Reading:
        # CUDA and NVML may number the same GPUs differently; the UUID cannot be mistaken.
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        return telemetry.nvml(index, uuid=None if uuid is None else str(uuid))

    def bf16_supported(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def fp8_granularities(self) -> tuple[str, ...]:
        # torch._scaled_mm takes FP8 from compute capability 8.9 on, per-row scales from 9.0 on.
        capability = torch.cuda.get_device_capability()
        if capability < (8, 9):
            return ()
        return ("tensor",) if capability < (9, 0) else ("tensor", "row")

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        name = torch.cuda.get_device_name()
        if "NVL" in name or " MIG " in name:
            return None
        return next((table.get(dtype) for part, table in _PEAKS if part in name), None)

    def collective_environment(self, nodes: int) -> Mapping[str, str]:
        return {}

    def process_group_backend(self, requested: str | None) -> str | None:
        return requested

    def adamw(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=True, **options)

    def fused(self, name: str) -> Callable[..., Any] | None:
        return None

    def pins_host_memory(self) -> bool:
        return True

    def timed_event(self) -> TimedEvent:
        return torch.cuda.Event(enable_timing=True)

    def new_stream(self) -> Any:
        return torch.cuda.Stream()

    def profiler_activity(self) -> str:
        return "CUDA"

    def torch_overrides(self) -> Mapping[str, Any]:
        return {}
