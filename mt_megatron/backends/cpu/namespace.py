"""What Megatron's modules see as ``torch.cuda`` when the device is the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, overload

import torch

from mt_megatron.backends.base import Backend
from mt_megatron.backends.cpu.rng import device_generator
from mt_megatron.backends.namespace import DeviceNamespace
from mt_megatron.backends.telemetry.readings import number
from mt_megatron.host import limits

# Streams and events for a device that finishes every operation before it returns.


class Event:
    """``torch.cuda.Event`` for synchronous execution: a moment on the monotonic clock."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        if interprocess:
            raise NotImplementedError("the cpu backend has no events that are shared between processes")
        self._timed = enable_timing
        self._at_ns: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._at_ns = time.perf_counter_ns()

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing to wait for: what was recorded has already finished."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for: what was recorded has already finished."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: one of the two was not recorded, or was made without ``enable_timing``.
        """
        if not (self._timed and end_event._timed):
            raise RuntimeError("elapsed_time needs both events to be made with enable_timing=True")
        if self._at_ns is None or end_event._at_ns is None:
            raise RuntimeError("elapsed_time needs both events to be recorded first")
        return (end_event._at_ns - self._at_ns) / 1e6


class Stream:
    """``torch.cuda.Stream`` for synchronous execution: an identity, and nothing to order."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = device
        self.priority = priority
        self.cuda_stream = 0

    def synchronize(self) -> None:
        """Nothing is pending."""

    def wait_stream(self, stream: Stream) -> None:
        """Nothing is pending."""

    def wait_event(self, event: Event) -> None:
        """Nothing is pending."""

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class StreamTable:
    """The default stream and the current one, as ``torch.cuda`` keeps them."""

    def __init__(self) -> None:
        self.default = Stream()
        self.current = self.default

    def set_current(self, stream: Stream | None) -> None:
        if stream is not None:
            self.current = stream


class StreamContext:
    """``with torch.cuda.stream(s)``: makes ``s`` current, and the old one again afterwards."""

    def __init__(self, table: StreamTable, stream: Stream | None) -> None:
        self._table = table
        self._stream = stream
        self._before: Stream | None = None

    def __enter__(self) -> None:
        self._before = self._table.current
        self._table.set_current(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._table.set_current(self._before)


# The namespace.


def _index(backend: Backend, device: Any) -> int:
    """Index of a device given as None, an integer, a string or a ``torch.device``."""
    if device is None:
        return backend.current_device()
    if isinstance(device, int):
        index = backend.current_device() if device < 0 else device
    else:
        found = torch.device(device).index
        index = backend.current_device() if found is None else found
    backend.device(index)
    return index


class _DeviceContext:
    """``with torch.cuda.device(i)``: makes ``i`` current, and the old one again afterwards."""

    def __init__(self, backend: Backend, device: Any) -> None:
        self._backend = backend
        # Megatron passes -1 for "the current one", as torch itself does.
        self.idx = _index(backend, device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = self._backend.current_device()
        self._backend.set_device(self.idx)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._backend.set_device(self._before)


def _amp(backend: Backend) -> DeviceNamespace:
    def custom_fwd(function: Any = None, *, cast_inputs: Any = None) -> Any:
        return torch.amp.custom_fwd(function, device_type="cpu", cast_inputs=cast_inputs)

    def custom_bwd(function: Any = None) -> Any:
        return torch.amp.custom_bwd(function, device_type="cpu")

    def autocast(
        enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
    ) -> Any:
        return torch.autocast("cpu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)

    def grad_scaler(*args: Any, **kwargs: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", *args, **kwargs)

    return DeviceNamespace(
        "torch.cuda.amp",
        backend.name,
        {"custom_fwd": custom_fwd, "custom_bwd": custom_bwd, "autocast": autocast, "GradScaler": grad_scaler},
    )


class _Generators(Sequence[torch.Generator]):
    """The generator of every device, which are one. How many there are may be told after ``patch()``: by a
    launcher within Python, which sets ``LOCAL_WORLD_SIZE`` in processes that it forked."""

    def __init__(self, backend: Backend, generator: torch.Generator) -> None:
        self._backend, self._generator = backend, generator

    def __len__(self) -> int:
        return self._backend.device_count()

    @overload
    def __getitem__(self, index: int) -> torch.Generator: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[torch.Generator, ...]: ...
    def __getitem__(self, index: int | slice) -> torch.Generator | tuple[torch.Generator, ...]:
        return ((self._generator,) * len(self))[index]


def _rng(backend: Backend) -> dict[str, Any]:
    generator = device_generator()

    def get_rng_state(device: Any = None) -> torch.Tensor:
        _index(backend, device)
        return backend.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        _index(backend, device)
        backend.set_rng_state(new_state)

    def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
        for state in new_states:
            backend.set_rng_state(state)

    return {
        "default_generators": _Generators(backend, generator),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [backend.get_rng_state() for _ in range(backend.device_count())],
        "set_rng_state_all": set_rng_state_all,
        "manual_seed": backend.manual_seed,
        "manual_seed_all": backend.manual_seed,
        "seed": generator.seed,
        "seed_all": generator.seed,
        "initial_seed": generator.initial_seed,
        # CUDA queues such calls until the driver is up; here there is nothing to wait for.
        "_lazy_call": lambda callable, **_: callable(),
    }


def _memory(backend: Backend) -> dict[str, Any]:
    def allocated(device: Any = None) -> int:
        return backend.memory_allocated() or 0

    def peak(device: Any = None) -> int:
        return backend.max_memory_allocated() or 0

    def stats(device: Any = None) -> dict[str, int]:
        now, most = allocated(), peak()
        return {
            f"{kind}_bytes.all.{which}": most if which == "peak" else now
            for kind in ("allocated", "active", "reserved")
            for which in ("current", "peak")
        } | {"num_alloc_retries": 0, "num_ooms": 0, "allocation.all.current": 0, "allocation.all.peak": 0}

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        memory = limits.memory()
        return memory.available, memory.total

    def nothing(*_: Any) -> None:
        """Neither a cache to empty nor a peak to reset: the kernel keeps the figure."""

    return {
        "memory_allocated": allocated,
        "max_memory_allocated": peak,
        "memory_reserved": allocated,
        "max_memory_reserved": peak,
        "memory_stats": stats,
        "mem_get_info": mem_get_info,
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "reset_peak_memory_stats": nothing,
        "reset_max_memory_allocated": nothing,
        "OutOfMemoryError": torch.OutOfMemoryError,
    }


def _telemetry(backend: Backend) -> dict[str, Any]:
    # torch.cuda gives numbers, and 0 would be a lie: what the host does not tell is NaN.
    def field(name: str, scale: float = 1.0) -> Any:
        return lambda device=None: scale * number(getattr(backend.telemetry(_index(backend, device)), name))

    return {
        "utilization": field("utilization"),
        "temperature": field("temperature"),
        "power_draw": field("power", 1000.0),  # torch has milliwatts.
        "clock_rate": field("clock"),
    }


def _properties(backend: Backend) -> dict[str, Any]:
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=backend.device_name(_index(backend, device)),
            total_memory=backend.total_memory(),
            multi_processor_count=limits.processors(),
            major=0,
            minor=0,
        )

    return {
        "get_device_name": lambda device=None: backend.device_name(_index(backend, device)),
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": get_device_properties,
        "is_bf16_supported": lambda including_emulation=True: backend.bf16_supported(),
    }


def _tensor_types() -> dict[str, Any]:
    kinds = "Float Double Half BFloat16 Long Int Short Char Byte Bool".split()  # noqa: SIM905
    return {f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in kinds}


def cuda_namespace(backend: Backend) -> DeviceNamespace:
    """The ``torch.cuda`` of redirected modules. Names it lacks raise ``UnsupportedDeviceCall``."""
    streams = StreamTable()

    def synchronize(device: Any = None) -> None:
        _index(backend, device)
        backend.synchronize()

    class device:
        """Bound to ``backend``; see ``_DeviceContext``."""

        def __new__(cls, device: Any) -> Any:
            return _DeviceContext(backend, device)

    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": backend.device_count,
        "current_device": backend.current_device,
        "set_device": lambda device: backend.set_device(_index(backend, device)),
        "device": device,
        "synchronize": synchronize,
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: streams.current,
        "default_stream": lambda device=None: streams.default,
        "set_stream": streams.set_current,
        "stream": lambda stream: StreamContext(streams, stream),
        "is_current_stream_capturing": lambda: False,
        "nvtx": DeviceNamespace(
            "torch.cuda.nvtx",
            backend.name,
            {"range_push": lambda msg: None, "range_pop": lambda: None, "mark": lambda msg: None},
        ),
        "amp": _amp(backend),
    }
    members |= _rng(backend) | _memory(backend) | _telemetry(backend) | _properties(backend) | _tensor_types()
    return DeviceNamespace("torch.cuda", backend.name, members)
