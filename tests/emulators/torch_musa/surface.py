"""``torch.musa``: the names in ``torch_musa_surface.txt``, no others."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import psutil
import torch

from . import amp, generator, memory, refusals, streams
from .device_index import device_index

module = types.ModuleType("torch.musa", "The emulated torch.musa.")

_waiting: list[Callable[[], None]] = []
_initialized = False
_allow_tf32 = False


def is_initialized() -> bool:
    return _initialized


def _lazy_init() -> None:
    global _initialized
    if not _initialized:
        _initialized = True
        module.default_generators = (generator.default,)  # type: ignore[attr-defined]
        while _waiting:
            _waiting.pop(0)()


def _lazy_call(callable: Callable[[], None], **kwargs: Any) -> None:
    if _initialized:
        callable()
    else:
        _waiting.append(callable)


class device:
    """``with torch.musa.device(i)``."""

    def __init__(self, device: Any) -> None:
        self.idx = device_index(device)

    def __enter__(self) -> None:
        _lazy_init()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is only one."""


class device_of(device):
    """``with torch.musa.device_of(tensor)``."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device if obj.device.type == "musa" else None)


class _DeviceGuard:
    def __init__(self, index: int) -> None:
        self.idx = index

    def __enter__(self) -> None:
        """There is only one."""

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is only one."""


def set_device(device: Any) -> None:
    device_index(device)
    _lazy_init()


def get_device_name(device: Any = None) -> str:
    return str(get_device_properties(device).name)


def get_device_capability(device: Any = None) -> tuple[int, int]:
    properties = get_device_properties(device)
    return properties.major, properties.minor


def get_device_properties(device: Any) -> types.SimpleNamespace:
    device_index(device)
    # The one card with MCCL whose capability is on record, or as asked; torch sees the host's memory.
    major, minor = map(int, os.environ.get("EMULATED_MUSA_CAPABILITY", "2.2").split("."))
    return types.SimpleNamespace(
        name="MTT S4000 (emulated)",
        major=major,
        minor=minor,
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=psutil.cpu_count(),
    )


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    device_index(device), device_index(peer_device)
    return False


def current_device() -> int:
    _lazy_init()
    return 0


def is_available() -> bool:
    return True


def synchronize(device: Any = None) -> None:
    device_index(device)
    streams.synchronize_all()


def device_count() -> int:
    return 1


def register_musa_hook() -> None:
    """Done when the module was imported."""


def get_arch_list() -> list[str]:
    return ["mp_22"]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def is_tf32_supported() -> bool:
    return True


def amp_definitely_not_available() -> bool:
    return False


def register_deserialization() -> None:
    torch.serialization.register_package(19, _tag, _deserialize)


def _tag(storage: Any) -> str | None:
    return "musa:0" if storage.device.type == "musa" else None


def _deserialize(storage: Any, location: str) -> Any:
    if not str(location).startswith("musa"):
        return None
    device_index(location)
    from .storage import device_storage

    copy = torch.UntypedStorage(storage.nbytes())
    copy.copy_(storage)
    return device_storage(copy)


def get_allocator_backend() -> str:
    return "native"


def ipc_collect() -> None:
    """Nothing is shared between processes."""


def musart() -> Any:
    raise _nothing_behind("musart")


def get_rng_state(device: Any = "musa") -> torch.Tensor:
    _lazy_init()
    device_index(device)
    return generator.default.get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state(new_state: torch.Tensor, device: Any = "musa") -> None:
    device_index(device)
    state = new_state.clone()
    _lazy_call(lambda: generator.default.set_state(state) and None)


def set_rng_state_all(new_states: Any) -> None:
    for state in new_states:
        set_rng_state(state)


def manual_seed(seed: int) -> None:
    number = int(seed)
    _lazy_call(lambda: generator.default.manual_seed(number) and None)


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def seed() -> None:
    _lazy_call(lambda: generator.default.seed() and None)


def seed_all() -> None:
    seed()


def initial_seed() -> int:
    _lazy_init()
    return generator.default.initial_seed()


@contextlib.contextmanager
def fork_rng(
    devices: Any = None,
    enabled: bool = True,
    _caller: str = "fork_rng",
    _devices_kw: str = "devices",
    device_type: str = "musa",
) -> Iterator[None]:
    if not enabled:
        yield
        return
    host, own = torch.get_rng_state(), get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        set_rng_state(own)


def version() -> tuple[int, int, int]:
    return 0, 0, 0


def set_flags(_allow_tf32: bool) -> bool:
    before = globals()["_allow_tf32"]
    globals()["_allow_tf32"] = _allow_tf32
    return bool(before)


@contextlib.contextmanager
def flags(allow_tf32: bool = False) -> Iterator[None]:
    before = set_flags(allow_tf32)
    try:
        yield
    finally:
        set_flags(before)


def is_current_stream_capturing() -> bool:
    return False


def _nothing_behind(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"torch.musa.{name}: there is nothing on a CPU that the emulator could do here"
    )


def _absent(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _nothing_behind(name)

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


def _absent_class(name: str, methods: str) -> type:
    refuse = _absent(name)
    return type(
        name, (), {"__new__": refuse, **{each: _absent(f"{name}.{each}") for each in methods.split()}}
    )


_PRESENT = """
device device_of set_device get_device_name get_device_capability get_device_properties
can_device_access_peer current_device is_available synchronize device_count _DeviceGuard register_musa_hook
get_arch_list is_bf16_supported is_tf32_supported amp_definitely_not_available register_deserialization
get_allocator_backend ipc_collect musart get_rng_state get_rng_state_all set_rng_state set_rng_state_all
manual_seed manual_seed_all seed seed_all initial_seed fork_rng version set_flags flags
is_current_stream_capturing is_initialized _lazy_init _lazy_call
""".split()  # noqa: SIM905
_MEMORY = """
set_per_process_memory_fraction empty_cache memory_stats memory_stats_as_nested_dict
reset_accumulated_memory_stats reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached
memory_stats_all memory_snapshot memory_summary memory_allocated max_memory_allocated memory_reserved
max_memory_reserved mem_get_info
""".split()  # noqa: SIM905
_STREAMS = """
Stream ExternalStream Event StreamContext stream set_stream _set_stream_by_id current_stream default_stream
""".split()  # noqa: SIM905
_ABSENT = """
current_blas_handle current_blaslt_handle _record_memory_history _dump_snapshot _set_allocator_settings
change_current_allocator use_mem_pool update_musa_graph_with_profile graph_pool_handle make_graphed_callables
set_torch_attributes set_module_attributes set_storage_attributes set_profiler_attributes init_reductions
_init_inductor_backend_registration _register_ao_intrinsic_modules apply_lowering_patch set_attributes
overwrite_cuda_api parseEnvForUMM use_unified_cpu_allocator
""".split()  # noqa: SIM905
_ABSENT_CLASSES = {
    "MUSAPluggableAllocator": "__init__",
    "MemPool": "__init__ id allocator",
    "MemPoolContext": "__init__ active_pool",
    "MudnnModule": "",
    "graph": "__init__",
    "MUSAGraph": (
        "capture_begin capture_end reinstantiate_graph replay reset pool enable_debug_mode debug_dump "
        "get_latest_instance"
    ),
}


def _fill() -> None:
    members: dict[str, Any] = {name: globals()[name] for name in _PRESENT}
    members |= {name: getattr(memory, name) for name in _MEMORY}
    members |= {name: getattr(streams, name) for name in _STREAMS}
    members |= {name: _absent(name) for name in _ABSENT}
    members |= {name: _absent_class(name, methods) for name, methods in _ABSENT_CLASSES.items()}
    members["get_amp_supported_dtype"] = amp.get_amp_supported_dtype
    members["amp"] = amp.module
    members["mccl"] = types.SimpleNamespace(version=lambda: (0, 0, 0))
    # What torch itself calls on the module of any PrivateUse1 device.
    members["_is_in_bad_fork"] = lambda: False
    for name, value in members.items():
        setattr(module, name, value)


_fill()


def extend_torch() -> None:
    """What the real package puts into torch's own modules."""
    torch.version.musa = "0.0 (emulated)"  # type: ignore[attr-defined]
    torch.backends.mudnn = types.SimpleNamespace(allow_tf32=False)  # type: ignore[attr-defined]
    torch.distributed.is_mccl_available = lambda: True  # type: ignore[attr-defined]
    torch.random.fork_rng = fork_rng
    torch._C._profiler.ProfilerActivity.MUSA = torch._C._profiler.ProfilerActivity.PrivateUse1  # type: ignore[attr-defined]
    register_deserialization()
    refusals.compiled()
