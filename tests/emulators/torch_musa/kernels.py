"""Kernels of the emulated device: metadata as it is, all arithmetic by the CPU on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import generator, refusals
from .storage import _CPU, allocate, device_storage, host_view, moved, on_device, place

aten = torch.ops.aten
_libraries: list[torch.library.Library] = []

# Kernels that only write metadata; the CPU's are right for any device.
_METADATA = (
    aten.as_strided.default,
    aten.view.default,
    aten._reshape_alias.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
)

# Autocast to the lower precision, as the device's own list begins.
_LOWER_PRECISION = (
    aten.linear.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.matmul.default,
    aten.scaled_dot_product_attention.default,
)


class _Call:
    """One call of an operator: its arguments on the host, and the way back."""

    def __init__(self) -> None:
        # The host views are kept until the end: an id is only good while its object lives.
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type != "musa":
                return value
            view = host_view(value)
            self.pairs.append((value, view))
            return view
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_host(each) for each in value)
        if isinstance(value, torch.device) and value.type == "musa":
            return torch.device("cpu")
        return value

    def to_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for original, view in self.pairs:
                if view is value:
                    return original
            for original, view in self.pairs:
                if view.untyped_storage()._cdata == value.untyped_storage()._cdata:
                    return on_device(
                        original.untyped_storage(),
                        value.dtype,
                        value.storage_offset(),
                        value.shape,
                        value.stride(),
                    )
            return moved(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_device(each) for each in value)
        return value

    def follow_resizes(self) -> None:
        """An ``out=`` argument may have been given another shape."""
        for original, view in self.pairs:
            if view.shape != original.shape or view.stride() != original.stride():
                storage = device_storage(view.untyped_storage())
                place(original, storage, view.storage_offset(), view.shape, view.stride())


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.Tag.nondeterministic_seeded in op.tags and kwargs.get("generator") is None:
        with generator.as_host_default():
            return _run(op, args, kwargs)
    return _run(op, args, kwargs)


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    call = _Call()
    _require_one_device(op, args)
    refusals.running(op.name())
    refusals.sorting(op.name(), args)
    result = op(
        *(call.to_host(each) for each in _with_tensors(op, args)),
        **{name: call.to_host(each) for name, each in kwargs.items()},
    )
    call.follow_resizes()
    return call.to_device(result)


def _with_tensors(op: Any, args: Any) -> Any:
    """A number that torch wrapped in a tensor reaches a Python kernel as a plain number, also where
    the operator takes nothing but tensors."""
    wanted = op._schema.arguments
    if not any(isinstance(each, (int, float)) for each in args):
        return args
    return [
        torch.tensor(each, dtype=torch.get_default_dtype() if isinstance(each, float) else None)
        if isinstance(each, (int, float)) and str(argument.type) == "Tensor"
        else each
        for each, argument in zip(args, wanted, strict=False)
    ]


def _require_one_device(op: Any, args: Any) -> None:
    """What a real device's kernels refuse; a CPU kernel over host memory would just do it."""
    for value in args:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            # Indices may be on the host, and a number in a zero-dimensional tensor always may.
            if (
                isinstance(each, torch.Tensor)
                and each.device.type == "cpu"
                and each.dim()
                and "index" not in op.name()
            ):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {op.name()} found one on cpu and "
                    "one on musa:0"
                )


def _empty(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    refusals.running("aten::empty")
    like = torch.empty(size, dtype=dtype, memory_format=memory_format, device="meta")
    return allocate(like.shape, like.stride(), like.dtype)


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    refusals.running("aten::empty_strided")
    return allocate(size, stride, dtype or torch.get_default_dtype())


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    into = host_view(target) if target.device.type == "musa" else target
    into.copy_(host_view(source) if source.device.type == "musa" else source)
    return target


def _resize(self: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    call = _Call()
    call.to_host(self).resize_(size, memory_format=memory_format)
    call.follow_resizes()
    return self


def _convolution(*args: Any) -> Any:
    _require_one_device(aten.convolution.default, args)
    call = _Call()
    return call.to_device(aten.convolution.default(*(call.to_host(each) for each in args)))


def _convolution_backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    call = _Call()
    host = [call.to_host(each) for each in (grad, input, weight)]
    # The general operator also wants to know the bias's shape, when there is one.
    result: tuple[torch.Tensor | None, ...] = call.to_device(
        aten.convolution_backward.default(*host, [weight.shape[0]], *rest)
    )
    return result


def _autocast(op: Any) -> Callable[..., Any]:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        floating = (
            isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == "musa"
        )
        return value.to(torch.get_autocast_dtype("musa")) if floating else value

    def lower(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*(cast(each) for each in args), **{name: cast(each) for name, each in kwargs.items()})

    return lower


def register() -> None:
    """Give the PrivateUse1 key its kernels, for the rest of the process."""
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((every, own))
    every.fallback(_fallback, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own.impl("empty.memory_format", _empty, "PrivateUse1")
    own.impl("empty_strided", _empty_strided, "PrivateUse1")
    own.impl("resize_", _resize, "PrivateUse1")
    own.impl("convolution_overrideable", _convolution, "PrivateUse1")
    own.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    own.impl("_copy_from", _copy_from, "PrivateUse1")
    own.impl("_copy_from_and_resize", _copy_from, "PrivateUse1")
    own.impl("_local_scalar_dense", lambda tensor: host_view(tensor).item(), "PrivateUse1")
    for op in _METADATA:
        name = op.name().removeprefix("aten::")
        own.impl(name, _redispatched(op), "PrivateUse1")
    for op in _LOWER_PRECISION:
        own.impl(op.name().removeprefix("aten::"), _autocast(op), "AutocastPrivateUse1")


def _redispatched(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: op.redispatch(_CPU, *args, **kwargs)
