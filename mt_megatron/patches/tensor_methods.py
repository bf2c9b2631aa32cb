"""``.cuda()``, ``.to('cuda')`` and their kin, decided by the module that calls them.

Methods cannot be rebound per module, so each gets a thin wrapper that looks at its caller: code in
scope reaches the active backend, every other library gets the method it always had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..backends.base import Backend
from ..backends.translate import DeviceTranslator
from ..patching.spec import Patch
from .scope import caller_in_scope

_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def _to(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if caller_in_scope():
            # Here alone a positional integer is a device index and not a size.
            if args:
                args = (translator.device(args[0]), *args[1:])
            elif kwargs.get("device") is not None:
                kwargs["device"] = translator.device(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _cuda(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def cuda(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not caller_in_scope():
            return original(self, device, *args, **kwargs)
        wanted = translator.backend.device() if device is None else translator.device(device)
        kwargs.pop("memory_format", None)
        return self.to(wanted, *args, **kwargs)

    return cuda


def _new(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(self: Any, *args: Any, **kwargs: Any) -> Any:
        if caller_in_scope():
            args, kwargs = translator.arguments(args, kwargs)
        return original(self, *args, **kwargs)

    return new


def _pin_memory(original: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def pin_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        if caller_in_scope() and translator.backend.device_type == "cpu":
            return self
        return original(self, *args, **kwargs)

    return pin_memory


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
    ]
