"""Turn what code written for CUDA calls a device into what the active backend calls it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .base import Backend

_CUDA = re.compile(r"cuda(?::(\d+))?\Z")

# Constructors with a ``device`` argument. ``torch.utils._device`` has most of them in a private
# table; a name that this torch lacks is passed over.
_FACTORIES = """
arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted
empty_quantized empty_strided eye frombuffer from_file full full_like hamming_window hann_window
kaiser_window linspace logspace normal ones ones_like rand rand_like randint randint_like randn
randn_like randperm range scalar_tensor sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor
sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices zeros zeros_like
""".split()  # noqa: SIM905


class DeviceTranslator:
    """Maps ``'cuda'``, ``'cuda:N'``, ``torch.device('cuda', N)`` and bare indices to ``backend``."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def is_foreign(self, value: Any) -> bool:
        """Whether ``value`` names a CUDA device by string or ``torch.device`` (indices do not)."""
        if isinstance(value, str):
            return _CUDA.match(value) is not None
        return isinstance(value, torch.device) and value.type == "cuda"

    def device(self, value: Any) -> Any:
        """The backend's device for ``value``; anything that does not mean CUDA comes back as it is.

        A bare integer is a device index, as in ``device=torch.cuda.current_device()``.
        """
        if isinstance(value, str):
            found = _CUDA.match(value)
            if found is None:
                return value
            return self._device_of(None if found[1] is None else int(found[1]))
        if isinstance(value, torch.device):
            return self._device_of(value.index) if value.type == "cuda" else value
        if isinstance(value, int) and not isinstance(value, bool):
            return self.backend.device(value)
        return value

    def _device_of(self, index: int | None) -> torch.device:
        """``cuda`` without an index is the current device, as in torch."""
        return self.backend.device(self.backend.current_device() if index is None else index)

    def device_type(self, value: Any) -> Any:
        """``'cuda'`` -> the backend's type string, for autocast and device meshes."""
        return self.backend.device_type if isinstance(value, str) and _CUDA.match(value) else value

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Translate a factory's arguments: ``device=`` in every form; positional ones by string or
        ``torch.device`` only, since a positional integer is a size."""
        if any(self.is_foreign(a) for a in args):
            args = tuple(self.device(a) if self.is_foreign(a) else a for a in args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self.device(kwargs["device"])}
        if kwargs.get("pin_memory") and not self.backend.pins_host_memory():
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        return args, kwargs

    def map_location(self, value: Any) -> Any:
        """Translate ``torch.load(map_location=...)``: device, mapping of tags, or a callable."""
        if isinstance(value, Mapping):
            return {k: self._location(v) for k, v in value.items()}
        if value is None or callable(value):
            return value
        return self.device(value)

    def _location(self, value: Any) -> Any:
        device = self.device(value)
        return str(device) if isinstance(value, str) else device


def on_device(moved: Any, given: Any) -> Any:
    """``moved``, what a copy of the tensor ``given`` to the device returned. Host and device share memory on
    the CPU, so that it can be ``given`` itself. It is a copy where elements of ``given`` share memory, which
    no copy on a GPU does: a write to one of them would change others. A tensor that needs a gradient stays
    itself, a leaf above all."""
    shared = moved is given and given.device.type == "cpu" and not given.requires_grad
    if shared and _overlaps_itself(given):
        return given.clone()
    return moved


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    dims = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    if all(step > sum(a * (n - 1) for a, n in dims[:at]) for at, (step, _) in enumerate(dims)):
        return False
    if not dims[0][0]:
        return True
    span = 1 + sum(step * (size - 1) for step, size in dims)
    offsets = torch.arange(span).as_strided(tensor.shape, tensor.stride())
    return bool(offsets.unique().numel() < tensor.numel())


def _factory(function: Callable[..., Any], translator: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(function)
    def translated(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        to_device = kwargs.get("device") not in (None, "cpu") or any(map(translator.is_foreign, args))
        args, kwargs = translator.arguments(args, kwargs)
        made = function(*args, **kwargs)
        return on_device(made, given) if to_device and given is not None else made

    return translated


def _class_like(real: type, name: str, call: Callable[..., Any]) -> type:
    """A stand-in for the class ``real``: calling it runs ``call``, type checks answer for ``real``."""

    class _Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

    return _Meta(name, (), {"__doc__": real.__doc__, "__module__": "torch"})


def _device_class(translator: DeviceTranslator) -> type:
    def make(*args: Any, **kwargs: Any) -> torch.device:
        if len(args) == 1 and not kwargs and isinstance(args[0], int):
            return translator.backend.device(args[0])
        device: torch.device = translator.device(torch.device(*args, **kwargs))
        return device

    return _class_like(torch.device, "device", make)


def _autocast_class(translator: DeviceTranslator) -> type:
    class autocast(torch.autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(translator.device_type(device_type), *args, **kwargs)

    return autocast


def torch_factories(translator: DeviceTranslator) -> dict[str, Any]:
    """Overrides for names directly below ``torch`` that take a device, for any redirected backend."""
    backend = translator.backend
    overrides: dict[str, Any] = {
        name: _factory(getattr(torch, name), translator) for name in _FACTORIES if hasattr(torch, name)
    }

    @functools.wraps(torch.load)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None and backend.device_type == "cpu":
            # Without this a file written on a GPU cannot be read where there is none.
            map_location = "cpu"
        return torch.load(f, translator.map_location(map_location), *args, **kwargs)

    def generator(device: Any = "cpu") -> torch.Generator:
        return torch.Generator(translator.device(device))

    def is_autocast_enabled(device_type: str | None = None) -> bool:
        return torch.is_autocast_enabled(translator.device_type(device_type or "cuda"))

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return torch.get_autocast_dtype(translator.device_type(device_type))

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        torch.set_autocast_dtype(translator.device_type(device_type), dtype)

    def set_default_device(device: Any) -> None:
        torch.set_default_device(translator.device(device))

    autocast = _autocast_class(translator)
    overrides |= {
        "device": _device_class(translator),
        "load": load,
        "Generator": _class_like(torch.Generator, "Generator", generator),
        "autocast": autocast,
        "amp.autocast": autocast,
        "is_autocast_enabled": is_autocast_enabled,
        "get_autocast_dtype": get_autocast_dtype,
        "set_autocast_dtype": set_autocast_dtype,
        "get_autocast_gpu_dtype": lambda: torch.get_autocast_dtype(backend.device_type),
        "set_autocast_gpu_dtype": lambda dtype: torch.set_autocast_dtype(backend.device_type, dtype),
        "set_default_device": set_default_device,
    }
    return overrides
