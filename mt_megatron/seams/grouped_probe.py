"""What ``torch._grouped_mm`` does on a device with groups that have no rows: asked once, of the device.

A weight gradient sums over an expert's rows. Of an expert without rows it must be zero, and kernels of some
devices leave that part of the result unwritten. Others do not know such groups at all.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_log = logging.getLogger("mt_megatron")

Verdict = Literal["whole", "mask", "none"]
"""``whole``: results are right. ``mask``: right but for the weight gradients of experts without rows, which
have to be set to zero. ``none``: there is no kernel, or its results are wrong."""

_GROUPS = ((0, 8, 16, 8), (8, 0, 0, 24), (8, 16, 8, 0), (0, 0, 32, 0))
"""Rows of each expert: the first has none, one in the middle, the last, all but one. Where all have none
no kernel is asked."""

_SIZE = 128


@cache
def verdict(kind: str, index: int | None, dtype: torch.dtype) -> Verdict:
    """What the kernel of device ``kind:index`` does with ``dtype``, logged unless all is right."""
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    if not hasattr(torch, "_grouped_mm"):
        return _one_by_one(kind, f"torch {torch.__version__} has none")
    try:
        found = [_ask(rows, device, dtype) for rows in _GROUPS]
    except (RuntimeError, NotImplementedError) as error:
        return _one_by_one(kind, str(error).splitlines()[0])
    if "none" in found:
        return _one_by_one(kind, "its results are wrong where experts have no rows")
    if "mask" in found:
        _log.warning(
            "experts: torch._grouped_mm on %s (%s) leaves the weight gradients of experts without rows "
            "unwritten; they are set to zero after each call",
            kind,
            dtype,
        )
        return "mask"
    return "whole"


def _one_by_one(kind: str, why: str) -> Verdict:
    _log.warning(
        "experts: torch._grouped_mm was asked for on %s; products one by one are used: %s", kind, why
    )
    return "none"


def _ask(rows: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Verdict:
    """The three products of one division into groups, beside the same products one by one."""
    # Small whole numbers: their sums are exact in any type and order. Not from a random stream.
    total, experts = sum(rows), len(rows)
    input = _numbers(total, _SIZE, 3).to(device, dtype)
    grad = _numbers(total, _SIZE, 5).to(device, dtype)
    weights = _numbers(experts * _SIZE, _SIZE, 7).view(experts, _SIZE, _SIZE).to(device, dtype)
    ends = torch.tensor(rows).cumsum(0).int().to(device)
    outputs, gradients = [], []
    for of_input, of_grad, weight in zip(input.split(rows), grad.split(rows), weights, strict=True):
        outputs.append(of_input @ weight.t())
        gradients.append(of_grad.t() @ of_input if len(of_input) else torch.zeros_like(weight))
    with _unwritten_memory_is_nan(device, dtype, (total * _SIZE, experts * _SIZE * _SIZE)):
        forward = torch._grouped_mm(input, weights.transpose(-2, -1), offs=ends)
        to_input = torch._grouped_mm(grad, weights, offs=ends)
        to_weights = torch._grouped_mm(grad.t(), input, offs=ends)
    if forward.device.type == "meta" or isinstance(forward, FakeTensor):
        return "whole"  # There are no numbers to look at.
    back = torch.cat([rows @ weight for rows, weight in zip(grad.split(rows), weights, strict=True)])
    if not (_equal(forward, torch.cat(outputs)) and _equal(to_input, back)):
        return "none"
    filled = [expert for expert, count in enumerate(rows) if count]
    expected = torch.stack(gradients)
    if not _equal(to_weights[filled], expected[filled]):
        return "none"
    return "whole" if _equal(to_weights, expected) else "mask"


def _numbers(rows: int, columns: int, step: int) -> Tensor:
    """-1, 0 and 1, float32 [rows, columns] on the host."""
    return (torch.arange(rows * columns).mul_(step) % 11 % 3 - 1).float().view(rows, columns)


def _equal(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.float().cpu(), expected.float().cpu())


@contextmanager
def _unwritten_memory_is_nan(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]
) -> Iterator[None]:
    """Inside, tensors that a kernel makes and does not write hold NaN: torch fills them in its deterministic
    mode, and memory that was freed last, which an allocator gives out again first, holds it too."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            freed = [torch.full((size,), torch.nan, dtype=dtype, device=device) for size in sizes * 2]
            del freed
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
