"""What Python can ask of a fake CUDA tensor although this torch was built without CUDA.

Some bindings of ``torch.Tensor`` set the CUDA device before they dispatch, which fails in a CPU-only
torch although the operation behind them is fine. Each is sent to that operation here; nothing about
shapes, dtypes or devices is decided in this file, except where a docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from tests.fake_cuda.stand_in import RecordingCuda

aten = torch.ops.aten

_INTEGERS = (torch.int64, torch.int32)
_MAKE_NUMBERS = (torch.arange, torch.full)
_MOVE_NUMBERS = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.contiguous)
_KEEP_NUMBERS = frozenset(
    {
        *_MAKE_NUMBERS,
        *_MOVE_NUMBERS,
        torch.histc,
        torch.bincount,
        torch.searchsorted,
        torch.as_tensor,
        torch.Tensor.scatter_add_,
        torch.Tensor.cumsum,
        torch.Tensor.int,
        torch.Tensor.long,
        torch.Tensor.reshape,
        torch.Tensor.view,
        torch.Tensor.ravel,
        torch.Tensor.T.__get__,
        torch.Tensor.transpose,
        torch.Tensor.sum,
        torch.Tensor.__getitem__,
    }
)


def known_numbers(tensor: Any) -> Any:
    """What ``tensor.numpy()`` would give for a fake tensor of counts or places."""
    known = getattr(tensor, "known", None)
    if known is None:
        raise TypeError(f"the numbers in {tensor} depend on data, and fake tensors hold none")
    with unset_fake_temporarily():
        return known.numpy()


def _keep_numbers(func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func in (torch.histc, torch.bincount):
        result.known = _even(args[0].numel(), result.numel())
    elif func is torch.Tensor.scatter_add_:
        result.known = _even(args[2].numel(), result.numel())
    elif func is torch.searchsorted:
        # Where the experts' choices end in a sorted list of them.
        result.known = _even(args[0].numel(), result.numel()).cumsum(0)
    elif func in _MAKE_NUMBERS:
        result.known = func(*args, **{**kwargs, "device": "cpu"})
    elif getattr(args[0], "known", None) is not None:
        known = args[0].known
        result.known = known.contiguous() if func in _MOVE_NUMBERS else func(known, *args[1:], **kwargs)


def _even(count: int, bins: int) -> torch.Tensor:
    return torch.tensor([count // bins + (bin < count % bins) for bin in range(bins)])


class OnCuda(TorchFunctionMode):
    """Also translates ``device=3``, ``'cuda'`` and ``.cuda()`` to a device with its index.

    ``parameter.expand_as(parameter)``, which DistributedDataParallel only writes to reach the gradient
    accumulator, gives an object that takes the hook and never calls it; ``hooks`` counts them.

    Where a mixture of experts asks the host how many tokens go where, routing is taken to be balanced:
    a histogram, however it is made, counts evenly, and its numbers (also those of ``arange`` and of
    ``full`` on the host) are kept in ``known`` through the operations that dispatchers apply to counts.
    """

    def __init__(self, cuda: RecordingCuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.hooks = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)  # Pinned or not, memory of the host is on the host.
        if "device" in kwargs:
            kwargs["device"] = self._indexed(kwargs["device"])
        if func is torch.Tensor.cuda:
            device = kwargs.pop("device", args[1] if len(args) > 1 else None)
            return _without_value(args[0]).to(self._indexed("cuda" if device is None else device))
        if func is torch.Tensor.to and len(args) > 1:
            args = (_without_value(args[0]), self._indexed(args[1]), *args[2:])
        if func is torch.tensor and getattr(kwargs.get("device"), "type", None) == "cuda":
            device = kwargs.pop("device")
            return _without_value(func(*args, **kwargs)).to(device)
        if func is torch.Tensor.expand_as and args[0] is args[1] and args[0].requires_grad:
            return _AccumulatorEdge(self)
        if func is torch.Tensor.numpy and isinstance(args[0], FakeTensor):
            return known_numbers(args[0])
        if func is torch.Tensor.__int__ and getattr(args[0], "known", None) is not None:
            return int(known_numbers(args[0]))
        if func is torch.repeat_interleave and len(args) > 1 and isinstance(args[1], FakeTensor):
            torch.add(*args[:2])  # Both must be on one device.
            return args[0].new_empty(int(known_numbers(args[1]).sum()))
        operation = _BY_OPERATION.get(func)
        if operation is not None and isinstance(args[0], FakeTensor) and args[0].device.type == "cuda":
            result = operation(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if func in _KEEP_NUMBERS and type(result) is FakeTensor and result.dtype in _INTEGERS:
            with unset_fake_temporarily():
                _keep_numbers(func, result, args, kwargs)
        return result

    def _indexed(self, device: Any) -> Any:
        """With the current device's index where it names none; anything that is no CUDA device as it is."""
        if type(device) is int:
            return torch.device("cuda", device)
        if isinstance(device, str | torch.device) and torch.device(device) == torch.device("cuda"):
            return torch.device("cuda", self.cuda.current)
        return device


class _AccumulatorEdge:
    """Stands in for ``tensor.grad_fn.next_functions[0][0]`` of a parameter's expansion."""

    def __init__(self, mode: OnCuda) -> None:
        self._mode = mode

    @property
    def grad_fn(self) -> _AccumulatorEdge:
        return self

    @property
    def next_functions(self) -> tuple[tuple[_AccumulatorEdge, int], ...]:
        return ((self, 0),)

    def register_hook(self, hook: Any) -> None:
        self._mode.hooks += 1


def _without_value(tensor: Any) -> Any:
    """FakeTensorMode knows the value of small literals and would try to compute it on the device."""
    known = getattr(tensor, "constant", None) is not None
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if known else tensor


def _copy(tensor: Any, source: Any, non_blocking: bool = False) -> Any:
    return aten.copy_.default(tensor, source, non_blocking)


def _uniform(tensor: Any, a: float = 0, b: float = 1, *, generator: Any = None) -> Any:
    """Filled with normal numbers instead: fake tensors hold none of either."""
    return tensor.normal_()


def _contiguous(tensor: Any, memory_format: Any = torch.contiguous_format) -> Any:
    if tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return aten.clone.default(tensor, memory_format=memory_format)


def _get_item(tensor: Any, index: Any) -> Any:
    """The view of slices, numbers, None and an ellipsis, then the gather of index tensors.

    How many elements a mask selects is data, which there is none of: taken is that it selects all.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [item for item in items if not isinstance(item, torch.Tensor)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        named = sum(item is not None and item is not Ellipsis for item in items)
        items[at : at + 1] = [slice(None)] * (tensor.dim() - named)
    dim, gathers = 0, {}
    for item in items:
        if item is None:
            tensor = aten.unsqueeze.default(tensor, dim)
        elif isinstance(item, slice):
            start, stop = (
                int(known_numbers(end)) if isinstance(end, FakeTensor) else end
                for end in (item.start, item.stop)
            )
            if (start, stop, item.step) != (None, None, None):
                tensor = aten.slice.Tensor(tensor, dim, start, stop, item.step or 1)
        elif isinstance(item, int):
            tensor = aten.select.int(tensor, dim, item)
            continue
        elif getattr(item, "dtype", None) is torch.bool:
            tensor = tensor.flatten(dim, dim + item.dim() - 1)
        else:
            gathers[dim] = item if isinstance(item, torch.Tensor) else torch.tensor(item)
        dim += 1
    if gathers:
        tensor = aten.index.Tensor(tensor, [gathers.get(d) for d in range(max(gathers) + 1)])
    return tensor


def _set_item(tensor: Any, index: Any, value: Any) -> None:
    if isinstance(index, torch.Tensor):
        source = value if isinstance(value, torch.Tensor) else torch.full((), value, device=tensor.device)
        if index.dtype is torch.bool:
            aten.copy_.default(tensor, torch.where(index, source.to(tensor.dtype), tensor))
        else:
            aten.index_put_.default(tensor, [index], source.to(tensor.dtype))
        return
    view = _get_item(tensor, index)
    if isinstance(value, torch.Tensor):
        aten.copy_.default(view, value)
    else:
        view.fill_(value)


def _masked_select(tensor: Any, mask: Any) -> Any:
    """As for indexing with a mask: all elements."""
    torch.logical_and(tensor, mask)  # Unlike an index, the mask must be on the tensor's device.
    return torch.broadcast_tensors(tensor, mask)[0].flatten()


def _nonzero(mask: Any) -> Any:
    """Again all of them."""
    return torch.empty(mask.numel(), mask.dim(), dtype=torch.int64, device=mask.device)


_BY_OPERATION: dict[Any, Callable[..., Any]] = {
    torch.Tensor.copy_: _copy,
    torch.Tensor.uniform_: _uniform,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.__getitem__: _get_item,
    torch.Tensor.__setitem__: _set_item,
    torch.Tensor.masked_select: _masked_select,
    torch.masked_select: _masked_select,
    torch.Tensor.nonzero: _nonzero,
}
