"""The CPU with Gloo: the reference every other backend is compared with, and the default."""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from mt_megatron.backends import telemetry
from mt_megatron.backends.cpu.namespace import cuda_namespace
from mt_megatron.backends.cpu.rng import device_generator, host_overrides
from mt_megatron.backends.distributed.namespace import distributed_overrides, translate_process_group_backend
from mt_megatron.backends.dtypes import histc_of_any_dtype
from mt_megatron.backends.translate import DeviceTranslator, torch_factories
from mt_megatron.errors import BackendError
from mt_megatron.host import limits


def loopback_interface() -> str | None:
    """Name of the network interface that has 127.0.0.1 (``lo`` on Linux, ``lo0`` on macOS)."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == "127.0.0.1" for a in addresses):
            return str(name)
    return None


class CpuBackend:
    """Runs on the host's cores. One "device" per local rank, all of them the same memory."""

    name = "cpu"
    device_type = "cpu"
    collective = "gloo"
    needs_redirection = True

    def __init__(self) -> None:
        # Per thread, and 0 in a new one: as the runtimes of CUDA and MUSA have it.
        self._current = threading.local()

    def available(self) -> tuple[bool, str]:
        if not torch.distributed.is_available():
            return False, "this torch was built without torch.distributed"
        if not torch.distributed.is_gloo_available():
            return False, "this torch was built without Gloo"
        return True, f"{limits.processors()} processors, Gloo"

    def device_count(self) -> int:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def current_device(self) -> int:
        return int(getattr(self._current, "index", 0))

    def set_device(self, index: int) -> None:
        self._current.index = self._checked(index)

    def device(self, index: int) -> torch.device:
        self._checked(index)
        return torch.device("cpu")

    def _checked(self, index: int) -> int:
        count = self.device_count()
        if not 0 <= index < count:
            raise BackendError(
                f"invalid device index {index}: the cpu backend has {count} device(s), one per local rank "
                "(LOCAL_WORLD_SIZE); use an index below that"
            )
        return index

    @cached_property
    def _processor(self) -> str:
        try:
            with open("/proc/cpuinfo", encoding="utf-8") as lines:
                for line in lines:
                    if line.startswith("model name"):
                        return line.partition(":")[2].strip()
        except OSError:
            pass
        return platform.processor() or platform.machine()

    def device_name(self, index: int) -> str:
        return self._processor

    def synchronize(self) -> None:
        """Every operation has finished when it returns."""

    def manual_seed(self, seed: int) -> None:
        device_generator().manual_seed(int(seed))

    def get_rng_state(self) -> torch.Tensor:
        return device_generator().get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        device_generator().set_state(state)

    def memory_allocated(self) -> int | None:
        """Resident set of this process: torch counts no bytes on the CPU."""
        import psutil

        return int(psutil.Process().memory_info().rss)

    def max_memory_allocated(self) -> int | None:
        """Largest resident set of this process so far."""
        try:
            import resource
        except ImportError:
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(peak if sys.platform == "darwin" else peak * 1024)

    def total_memory(self) -> int | None:
        return limits.memory().total

    def telemetry(self, index: int) -> telemetry.Reading:
        """The host's: every local rank shares it."""
        return telemetry.host()

    def bf16_supported(self) -> bool:
        return True

    def fp8_granularities(self) -> tuple[str, ...]:
        return ()

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return None

    def collective_environment(self, nodes: int) -> Mapping[str, str]:
        interface = loopback_interface()
        if nodes > 1 or interface is None:
            return {}
        return {"GLOO_SOCKET_IFNAME": interface}

    def process_group_backend(self, requested: str | None) -> str | None:
        return translate_process_group_backend(requested, collective="gloo", device_type="cpu")

    def adamw(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, fused=True, **options)

    def fused(self, name: str) -> Callable[..., Any] | None:
        return None

    def pins_host_memory(self) -> bool:
        """Pinned memory serves transfers to a device; without one torch refuses to make it."""
        return False

    def timed_event(self) -> None:
        """Every operation has finished when it returns."""

    def new_stream(self) -> None:
        """There is nothing to run beside."""

    def profiler_activity(self) -> None:
        """Operators run on the host."""

    def torch_overrides(self) -> Mapping[str, Any]:
        translator = DeviceTranslator(self)
        overrides = torch_factories(translator)
        overrides |= host_overrides(overrides, translator.is_foreign)
        overrides["cuda"] = cuda_namespace(self)
        overrides["histc"] = histc_of_any_dtype(torch.float64)
        for name, value in distributed_overrides(self).items():
            overrides[f"distributed.{name}"] = value
        return overrides
