"""Products of quantised operands: the exact reference, and the device's own kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mt_megatron.fp8.quantise import Quantised
from mt_megatron.fp8.recipe import Product, Role
from mt_megatron.seams.gemm import torch_gemm

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
    """The same by ``torch._scaled_mm``: scales per tensor or per row. All sizes are padded to multiples of
    16: the kernels ask for it of the two of ``b``, and cuBLAS has none for some numbers of rows of ``a`` (39
    and 130 on an H200)."""
    # Kernels read both operands along the summed dimension.
    left, right = a.laid(), b.laid()
    if 0 in (*left.shape, *right.shape):
        # An expert without tokens: kernels know no empty operands with scales per row.
        nothing = torch.zeros(left.shape[0], right.shape[0], dtype=dtype, device=left.device)
        return _into(nothing, None, out, accumulate)
    rows, columns = left.shape[0], right.shape[0]
    scale_a, scale_b = a.inverse, b.inverse
    if scale_a.dim() or scale_b.dim():
        scale_a = _padded_scales(scale_a, rows).reshape(-1, 1)
        scale_b = _padded_scales(scale_b, columns).reshape(1, -1)
    result = torch._scaled_mm(
        _padded(left),
        _padded(right).t(),
        scale_a,
        scale_b,
        out_dtype=dtype,
        use_fast_accum=product.fast_accumulate,
    )
    if result.shape != (rows, columns):
        result = result[:rows, :columns].contiguous()
    return _into(result, None, out, accumulate)


_MULTIPLE = 16


def _padded(codes: Tensor) -> Tensor:
    """``codes`` with rows and columns of zeros up to a multiple."""
    below, beside = (-size % _MULTIPLE for size in codes.shape)
    if not below and not beside:
        return codes
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, beside, 0, below)).view(codes.dtype)


def _padded_scales(scales: Tensor, rows: int) -> Tensor:
    """One fp32 scale [padded rows] for each row, of one for all or one for each."""
    padded = rows + -rows % _MULTIPLE
    if scales.numel() == 1:
        return scales.reshape(1).expand(padded).contiguous()
    return torch.nn.functional.pad(scales.reshape(-1), (0, padded - rows), value=1.0)


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
