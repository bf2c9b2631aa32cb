"""``.cuda()``, ``.to('cuda')``, ``.is_cuda`` and their kin, decided by the module that calls them.

Methods cannot be rebound per module, so each gets a thin wrapper that looks at its caller: code in
scope reaches the active backend, every other library gets the method it always had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mt_megatron.backends.base import Backend
from mt_megatron.backends.translate import DeviceTranslator, on_device
from mt_megatron.patches.device.scope import caller_beside_core, caller_in_scope
from mt_megatron.patching.spec import Patch

_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def _arrived(moved: Any, given: Any) -> Any:
    if not isinstance(given, torch.nn.Module):
        return on_device(moved, given)
    for module in given.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = on_device(buffer, buffer)
    return moved


def _to(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = None
        if caller_in_scope():
            wanted = args[0] if args else kwargs.get("device", kwargs.get("other"))
            # Here alone a positional integer is a device index and not a size.
            if args:
                args = (translator.device(args[0]), *args[1:])
            elif kwargs.get("device") is not None:
                kwargs["device"] = translator.device(kwargs["device"])
            if kwargs.get("non_blocking") and not translator.backend.pins_host_memory():
                # A copy to the host that does not wait goes to pinned memory.
                kwargs["non_blocking"] = False
        moved = original(self, *args, **kwargs)
        if isinstance(wanted, (torch.device, torch.Tensor, int)) or translator.is_foreign(wanted):
            return _arrived(moved, self)
        return moved

    return to


def _cuda(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def cuda(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not caller_in_scope():
            return original(self, device, *args, **kwargs)
        wanted = translator.device("cuda" if device is None else device)
        kwargs.pop("memory_format", None)
        return _arrived(self.to(wanted, *args, **kwargs), self)

    return cuda


def _storage(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    """For ``torch.load(map_location=lambda storage, place: storage.cuda(0))``."""

    @functools.wraps(original)
    def cuda(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not caller_in_scope():
            return original(self, device, *args, **kwargs)
        wanted = translator.device("cuda" if device is None else device)
        return self.cpu() if wanted.type == "cpu" else self.to(device=wanted)

    return cuda


def _new(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(self: Any, *args: Any, **kwargs: Any) -> Any:
        if caller_in_scope():
            args, kwargs = translator.arguments(args, kwargs)
        return original(self, *args, **kwargs)

    return new


def _to_empty(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def to_empty(self: Any, *, device: Any, recurse: bool = True) -> Any:
        if caller_in_scope():
            device = translator.device(device)
        return original(self, device=device, recurse=recurse)

    return to_empty


def _pin_memory(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def pin_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        if caller_in_scope() and not translator.backend.pins_host_memory():
            return on_device(self, self)
        return original(self, *args, **kwargs)

    return pin_memory


def _loader(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Pinning happens in a thread of torch's, where nobody could tell for whom it is done.
        if self.pin_memory and caller_in_scope() and not translator.backend.pins_host_memory():
            self.pin_memory = False

    return __init__


def _is_cuda(original: Any, translator: DeviceTranslator) -> property:
    """A property instead of torch's slot: where code asks, the backend's device is what it means."""

    def is_cuda(self: Any) -> bool:
        if caller_in_scope():
            return bool(self.device.type == translator.backend.device_type)
        answer: bool = original.__get__(self)
        return answer

    return property(is_cuda, doc=original.__doc__)


def _type(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    device_type = translator.backend.device_type
    own = "torch." if device_type == "cpu" else f"torch.{device_type}."

    @functools.wraps(original)
    def type(self: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if not caller_beside_core():
            return original(self, dtype, non_blocking, **kwargs)
        if dtype is None:
            name: str = original(self)
            return f"torch.cuda.{name[len(own) :]}" if self.device.type == device_type else name
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = own + dtype[len("torch.cuda.") :]
            return on_device(original(self, dtype, non_blocking, **kwargs), self)
        stands_for = getattr(dtype, "dtype", None)
        if stands_for is not None and getattr(dtype, "__module__", "") == f"torch.{device_type}":
            return self.to(translator.device("cuda"), stands_for, non_blocking=non_blocking)
        made = original(self, dtype, non_blocking, **kwargs)
        # On cpu torch.cuda.LongTensor is torch.LongTensor.
        return made if stands_for is None else on_device(made, self)

    return type


def patches(backend: Backend) -> list[Patch]:
    """Nothing for a backend that is CUDA itself."""
    if not backend.needs_redirection:
        return []
    translator = DeviceTranslator(backend)

    def method(owner: str, name: str, make: Callable[..., Any]) -> Patch:
        return Patch(
            id=f"device.{owner.rpartition(':')[2].lower()}_{name}",
            target=f"{owner}.{name}",
            kind="value",
            feature="device",
            reason="called from Megatron it means the active device; other callers keep the original",
            body=lambda original: make(original, translator),
        )

    tensor, module = "torch:Tensor", "torch.nn.modules.module:Module"
    return [
        method(tensor, "to", _to),
        method(tensor, "cuda", _cuda),
        method(tensor, "pin_memory", _pin_memory),
        *(method(tensor, name, _new) for name in _NEW),
        method(module, "to", _to),
        method(module, "cuda", _cuda),
        method(module, "to_empty", _to_empty),
        method("torch.utils.data.dataloader:DataLoader", "__init__", _loader),
        method("torch.storage:UntypedStorage", "cuda", _storage),
        method("torch.storage:TypedStorage", "cuda", _storage),
        method(tensor, "is_cuda", _is_cuda),
        method(tensor, "type", _type),
    ]
