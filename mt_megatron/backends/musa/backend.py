"""Moore Threads GPUs with MCCL, on torch_musa: Megatron's ``torch.cuda`` becomes ``torch.musa``.

Everything here uses the public names of torch_musa 2.7.1, which lives on torch 2.7.1. torch_musa is
imported when a backend object is asked whether it can be used, never by importing this module.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mt_megatron.backends import telemetry
from mt_megatron.backends.base import TimedEvent
from mt_megatron.backends.distributed.namespace import distributed_overrides, translate_process_group_backend
from mt_megatron.backends.dtypes import histc_of_any_dtype
from mt_megatron.backends.musa import cards
from mt_megatron.backends.musa.namespace import cuda_namespace
from mt_megatron.backends.translate import DeviceTranslator, torch_factories
from mt_megatron.errors import BackendError

_log = logging.getLogger("mt_megatron")


class PinnedMemory:
    """Pinned memory makes transfers asynchronous; without it they are right all the same."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    @functools.cache  # noqa: B019  (one object per backend, which lives as long as the process)
    def works(self) -> bool:
        """Whether ``torch.empty(..., pin_memory=True)`` works here. Says so, once, when it does not."""
        try:
            torch.empty(1, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            _log.warning(
                "pinned memory was asked for and %s cannot pin it (%s): ordinary memory is used, transfers "
                "wait for it",
                self._device_type,
                reason,
            )
            return False
        return True


def _musa() -> Any:
    """``torch.musa``, which is there once torch_musa was imported."""
    return torch.musa  # type: ignore[attr-defined]


class MusaBackend:
    """One Moore Threads GPU per local rank. ``MUSA_VISIBLE_DEVICES`` alone says which are there."""

    name = "musa"
    device_type = "musa"
    collective = "mccl"
    needs_redirection = True

    def __init__(self) -> None:
        self._pinned = PinnedMemory("musa")

    def available(self) -> tuple[bool, str]:
        if importlib.util.find_spec("torch_musa") is None:
            return False, "torch_musa is not installed"
        try:
            import torch_musa  # type: ignore[import-not-found]  # noqa: F401  (registers the device)
        except (ImportError, OSError, RuntimeError) as error:
            return False, f"torch_musa cannot be imported: {error}"
        if not _musa().is_available() or not _musa().device_count():
            visible = os.environ.get("MUSA_VISIBLE_DEVICES")
            chosen = "" if visible is None else f" (MUSA_VISIBLE_DEVICES={visible!r})"
            return False, f"torch_musa is installed, but no device or driver was found{chosen}"
        # A device's name begins to use MUSA, and then no rank that this process forks can use it.
        what = f"{_musa().device_count()} MUSA device(s)"
        if not torch.distributed.is_mccl_available():  # type: ignore[attr-defined]
            return False, f"{what}, but without MCCL, and Megatron needs a process group even on one device"
        ignored = "; CUDA_VISIBLE_DEVICES has no effect on it" if self._misled() else ""
        return True, f"{what}, MCCL{ignored}"

    @staticmethod
    def _misled() -> bool:
        return "CUDA_VISIBLE_DEVICES" in os.environ and "MUSA_VISIBLE_DEVICES" not in os.environ

    def device_count(self) -> int:
        return int(_musa().device_count())

    def current_device(self) -> int:
        return int(_musa().current_device())

    def set_device(self, index: int) -> None:
        count = self.device_count()
        if not 0 <= index < count:
            raise BackendError(
                f"invalid device index {index}: {count} MUSA device(s) are visible; start fewer processes "
                "per node or make more devices visible (MUSA_VISIBLE_DEVICES)"
            )
        _musa().set_device(index)

    def device(self, index: int) -> torch.device:
        return torch.device("musa", index)

    def device_name(self, index: int) -> str:
        return str(_musa().get_device_name(index))

    def synchronize(self) -> None:
        _musa().synchronize()

    def manual_seed(self, seed: int) -> None:
        _musa().manual_seed(int(seed))

    def get_rng_state(self) -> torch.Tensor:
        state: torch.Tensor = _musa().get_rng_state(self.current_device())
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        _musa().set_rng_state(state, self.current_device())

    def memory_allocated(self) -> int | None:
        return int(_musa().memory_allocated())

    def max_memory_allocated(self) -> int | None:
        return int(_musa().max_memory_allocated())

    def total_memory(self) -> int | None:
        return int(_musa().get_device_properties(self.current_device()).total_memory)

    def bf16_supported(self) -> bool:
        return bool(_musa().is_bf16_supported(including_emulation=False))

    def fp8_granularities(self) -> tuple[str, ...]:
        return cards.fp8_granularities(_musa().get_device_capability())

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return cards.peak_flops(self.device_name(self.current_device()), str(dtype).removeprefix("torch."))

    def telemetry(self, index: int) -> telemetry.Reading:
        return telemetry.mtml(index)

    def collective_environment(self, nodes: int) -> Mapping[str, str]:
        return {}

    def process_group_backend(self, requested: str | None) -> str | None:
        return translate_process_group_backend(requested, collective="mccl", device_type="musa")

    def adamw(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """``torch_musa.optim.FusedAdamW``, which takes no ``foreach``: it is fused anyhow."""
        import torch_musa

        options.pop("foreach", None)
        options.pop("fused", None)
        optimizer: torch.optim.Optimizer = torch_musa.optim.FusedAdamW(params, **options)
        return optimizer

    def fused(self, name: str) -> Callable[..., Any] | None:
        """muDNN's SwiGLU, which the torch that is built for torch_musa offers as
        ``torch.nn.functional.swish_glu``. Its attention is behind torch's own SDPA."""
        return getattr(torch.nn.functional, "swish_glu", None) if name == "swiglu" else None

    def pins_host_memory(self) -> bool:
        return self._pinned.works()

    def timed_event(self) -> TimedEvent:
        event: TimedEvent = _musa().Event(enable_timing=True)
        return event

    def new_stream(self) -> Any:
        return _musa().Stream()

    def profiler_activity(self) -> str:
        return "PrivateUse1"

    def torch_overrides(self) -> Mapping[str, Any]:
        translator = DeviceTranslator(self)
        overrides = torch_factories(translator)
        overrides["cuda"] = cuda_namespace(self, translator)
        overrides["histc"] = histc_of_any_dtype(torch.float32)
        for name, value in distributed_overrides(self).items():
            overrides[f"distributed.{name}"] = value
        return overrides
