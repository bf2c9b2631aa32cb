"""What Megatron's modules see as ``torch.cuda`` when the device is a Moore Threads GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mt_megatron.backends import telemetry
from mt_megatron.backends.base import Backend
from mt_megatron.backends.namespace import DeviceNamespace
from mt_megatron.backends.translate import DeviceTranslator
from mt_megatron.errors import BackendError

# ``torch.cuda.FloatTensor`` and its kin for a device that has no such classes.
_DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}


def tensor_types(device_type: str) -> dict[str, type]:
    """``FloatTensor`` ... for ``device_type``: calling one makes a tensor, ``isinstance`` asks for its
    dtype and device, as torch's legacy tensor classes do."""
    return {f"{kind}Tensor": _tensor_type(kind, dtype, device_type) for kind, dtype in _DTYPES.items()}


def _tensor_type(kind: str, dtype: torch.dtype, device_type: str) -> type:
    class Legacy(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return (
                isinstance(instance, torch.Tensor)
                and instance.dtype == dtype
                and instance.device.type == device_type
            )

        def __call__(cls, *args: Any) -> torch.Tensor:
            if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
                return torch.as_tensor(args[0]).to(device_type, dtype)
            sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
            return torch.empty(tuple(sizes) or (0,), dtype=dtype, device=device_type)

    return Legacy(f"{kind}Tensor", (), {"__module__": f"torch.{device_type}", "dtype": dtype})


def _translated(function: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    """``function``, also for devices that the caller calls ``cuda``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(translator.device(a) if translator.is_foreign(a) else a for a in args)
        if translator.is_foreign(kwargs.get("device")):
            kwargs["device"] = translator.device(kwargs["device"])
        return function(*args, **kwargs)

    return call


class _NotInstalled:
    """In place of ``torch.musa`` where torch_musa is not: the patches of this backend can be listed and
    checked against their sources anywhere, and nothing of it can be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise BackendError("the musa backend was called and torch_musa is not installed; install it first")


def _device_class(real: Any, translator: DeviceTranslator) -> type:
    if not isinstance(real, type):
        return type(real)

    class device(real):  # type: ignore[misc]
        def __init__(self, device: Any) -> None:
            super().__init__(translator.device(device) if translator.is_foreign(device) else device)

    return device


def _random(musa: Any) -> dict[str, Any]:
    return {
        "get_rng_state": musa.get_rng_state,
        "get_rng_state_all": musa.get_rng_state_all,
        "set_rng_state": musa.set_rng_state,
        "set_rng_state_all": musa.set_rng_state_all,
        "manual_seed": musa.manual_seed,
        "manual_seed_all": musa.manual_seed_all,
        "seed": musa.seed,
        "seed_all": musa.seed_all,
        "initial_seed": musa.initial_seed,
    }


def _memory(musa: Any) -> dict[str, Any]:
    return {
        "memory_allocated": musa.memory_allocated,
        "max_memory_allocated": musa.max_memory_allocated,
        "memory_reserved": musa.memory_reserved,
        "max_memory_reserved": musa.max_memory_reserved,
        "memory_stats": musa.memory_stats,
        "memory_summary": musa.memory_summary,
        "memory_snapshot": musa.memory_snapshot,
        "mem_get_info": musa.mem_get_info,
        "empty_cache": musa.empty_cache,
        "reset_peak_memory_stats": musa.reset_peak_memory_stats,
        "reset_max_memory_allocated": musa.reset_max_memory_allocated,
        "reset_accumulated_memory_stats": musa.reset_accumulated_memory_stats,
        "set_per_process_memory_fraction": musa.set_per_process_memory_fraction,
        "_record_memory_history": musa._record_memory_history,
        "_dump_snapshot": musa._dump_snapshot,
    }


def _properties(musa: Any) -> dict[str, Any]:
    def properties(device: Any = None) -> Any:
        # torch.cuda's may be called without a device, torch_musa's not.
        return musa.get_device_properties(musa.current_device() if device is None else device)

    return {
        "get_device_name": musa.get_device_name,
        "get_device_capability": musa.get_device_capability,
        "get_device_properties": properties,
        "can_device_access_peer": musa.can_device_access_peer,
        "is_bf16_supported": musa.is_bf16_supported,
        "synchronize": musa.synchronize,
        "set_device": musa.set_device,
        "current_stream": musa.current_stream,
        "default_stream": musa.default_stream,
    }


def _telemetry(backend: Backend, translator: DeviceTranslator) -> dict[str, Any]:
    def asking(field: str, scale: float = 1.0) -> Callable[..., float]:
        def ask(device: Any = None) -> float:
            index = device
            if isinstance(device, str | torch.device):
                index = torch.device(
                    translator.device(device) if translator.is_foreign(device) else device
                ).index
            if index is None or index < 0:  # the current one, as for torch.cuda
                index = backend.current_device()
            return scale * telemetry.number(getattr(backend.telemetry(index), field))

        return ask

    return {
        "utilization": asking("utilization"),
        "temperature": asking("temperature"),
        "power_draw": asking("power", 1000.0),  # torch has milliwatts.
        "clock_rate": asking("clock"),
    }


def cuda_namespace(backend: Backend, translator: DeviceTranslator) -> DeviceNamespace:
    """The ``torch.cuda`` of redirected modules. Names it lacks raise ``UnsupportedDeviceCall``."""
    musa: Any = getattr(torch, "musa", None) or _NotInstalled()
    with_a_device = _random(musa) | _memory(musa) | _properties(musa)
    members: dict[str, Any] = {name: _translated(value, translator) for name, value in with_a_device.items()}
    memory = {name: members[name] for name in _memory(musa)}
    members |= _telemetry(backend, translator) | tensor_types(backend.device_type)
    members |= {
        "is_available": musa.is_available,
        "is_initialized": musa.is_initialized,
        "init": musa._lazy_init,
        "_lazy_init": musa._lazy_init,
        # Calls queued through torch.cuda would wait for CUDA, which never starts here.
        "_lazy_call": musa._lazy_call,
        "device_count": musa.device_count,
        "current_device": musa.current_device,
        "device": _device_class(musa.device, translator),
        "device_of": musa.device_of,
        "Event": musa.Event,
        "Stream": musa.Stream,
        "ExternalStream": musa.ExternalStream,
        "StreamContext": musa.StreamContext,
        "stream": musa.stream,
        "set_stream": musa.set_stream,
        "is_current_stream_capturing": musa.is_current_stream_capturing,
        "get_arch_list": musa.get_arch_list,
        "ipc_collect": musa.ipc_collect,
        "cudart": musa.musart,
        "CUDAGraph": musa.MUSAGraph,
        "graph": musa.graph,
        "graph_pool_handle": musa.graph_pool_handle,
        "make_graphed_callables": musa.make_graphed_callables,
        "OutOfMemoryError": torch.OutOfMemoryError,
        "amp": DeviceNamespace(
            "torch.cuda.amp",
            backend.name,
            {
                "autocast": musa.amp.autocast,
                "GradScaler": musa.amp.GradScaler,
                "custom_fwd": musa.amp.custom_fwd,
                "custom_bwd": musa.amp.custom_bwd,
            },
        ),
        "memory": DeviceNamespace("torch.cuda.memory", backend.name, memory),
        # There are no ranges to push to; Megatron marks them whether or not anybody records.
        "nvtx": DeviceNamespace(
            "torch.cuda.nvtx",
            backend.name,
            {"range_push": lambda msg: None, "range_pop": lambda: None, "mark": lambda msg: None},
        ),
    }

    def default_generators() -> Any:
        musa._lazy_init()  # makes them
        return musa.default_generators

    return DeviceNamespace(
        "torch.cuda", backend.name, members, computed={"default_generators": default_generators}
    )
