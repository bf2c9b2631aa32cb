"""Products of quantised operands: the exact reference, and the device's own kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mt_megatron.fp8.quantise import Quantised
from mt_megatron.fp8.recipe import Product, Role
from mt_megatron.seams.gemm import torch_gemm

_log = logging.getLogger("mt_megatron")

Compute = Callable[..., Tensor]
"""``(role, a, b, product, dtype, out=None, accumulate=False) -> Tensor``."""


def reference(
    role: Role,
    a: Quantised,
    b: Quantised,
    product: Product,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """The product of what ``a`` and ``b`` stand for, in ``dtype``, with fp32 accumulation.

    Every decoded value and every block scale is exact in bf16, and every product of two of them in fp32, so
    a plain GEMM of decoded values adds exactly what a kernel adds that promotes its partial sums to fp32
    after each block. Scales per tensor or row multiply the result, within one unit in the last place of
    what a single rounding gives. On processors without bf16 kernels the GEMM runs by fp32's
    (``seams.widened``).
    """
    outer = _outer(a, b)
    left, right = a.values(dtype), b.values(dtype)
    if outer is None:
        return torch_gemm(role, left, right, out=out, accumulate=accumulate, widen=True)
    result = torch_gemm(role, left, right, widen=True)
    if out is not None:
        return _into(result, outer, out, accumulate)
    for scale in outer:
        # Powers of two are exact; others round a second time: at most one unit in the last place in all.
        result.mul_(scale)
    return result


def scaled_mm(
    role: Role,
    a: Quantised,
    b: Quantised,
    product: Product,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """The same by ``torch._scaled_mm``: scales per tensor or per row. Rows that are summed over are padded to
    a multiple of 16, which the kernels ask for.

    With scales per tensor the kernel writes the dtype of ``out``, so a weight gradient that is accumulated in
    fp32 is not rounded to ``dtype`` first. With scales per row it writes ``dtype`` alone: said once.
    """
    # Kernels read both operands along the summed dimension.
    left, right = a.laid(), b.laid()
    if 0 in (*left.shape, *right.shape):
        # An expert without tokens: kernels know no empty operands with scales per row.
        nothing = torch.zeros(left.shape[0], right.shape[0], dtype=dtype, device=left.device)
        return _into(nothing, None, out, accumulate)
    missing = -left.shape[1] % 16
    if missing:
        left, right = _pad(left, missing), _pad(right, missing)
    scale_a, scale_b = a.inverse, b.inverse
    written = dtype if out is None else torch.promote_types(dtype, out.dtype)
    if scale_a.dim() or scale_b.dim():
        if written is not dtype:
            say_rounded(dtype)
            written = dtype
        scale_a = scale_a.reshape(-1, 1).expand(left.shape[0], 1).contiguous()
        scale_b = scale_b.reshape(1, -1).expand(1, right.shape[0]).contiguous()
    result = torch._scaled_mm(
        left,
        right.t(),
        _aligned(scale_a),
        _aligned(scale_b),
        out_dtype=written,
        use_fast_accum=product.fast_accumulate,
    )
    return _into(result, None, out, accumulate)


@cache
def say_rounded(dtype: torch.dtype) -> None:
    """Log, once, that products with scales per row are rounded before they are accumulated."""
    _log.warning(
        "fp8: weight gradients are rounded to %s before they are accumulated: the device's kernels have no "
        "wider result with scales per row. A recipe with scales per tensor accumulates them in fp32",
        str(dtype).removeprefix("torch."),
    )


def _pad(codes: Tensor, missing: int) -> Tensor:
    """``codes`` followed by so many columns of zeros."""
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype)


def _aligned(scales: Tensor) -> Tensor:
    """``scales`` at an address that is a multiple of 16. Those of one expert lie between the others', and at
    other addresses cuBLAS has no kernel (CUBLAS_STATUS_NOT_SUPPORTED, seen on an H200)."""
    return scales if scales.data_ptr() % 16 == 0 else scales.clone()


def _outer(a: Quantised, b: Quantised) -> tuple[Tensor, ...] | None:
    """What multiplies the result: scalars, [rows, 1] and [1, columns]; None for nothing."""
    left, right = a.outer, b.outer
    if left is not None and left.dim():
        left = left.reshape(-1, 1)
    if right is not None and right.dim():
        right = right.reshape(1, -1)
    if left is not None and right is not None and not left.dim() and not right.dim():
        return (left * right,)
    return tuple(each for each in (left, right) if each is not None) or None


def _into(result: Tensor, outer: tuple[Tensor, ...] | None, out: Tensor | None, accumulate: bool) -> Tensor:
    if out is None:
        return result
    result = result.to(torch.promote_types(result.dtype, out.dtype))
    for scale in outer or ():
        result.mul_(scale)
    return out.add_(result) if accumulate else out.copy_(result)
