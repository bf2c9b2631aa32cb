"""Products of block-scaled operands by DeepGEMM (github.com/deepseek-ai/DeepGEMM, version 2).

``fp8_gemm_nt((a, scales of a), (b, scales of b), d, c=None, recipe=...)`` computes d = c + a @ b.T from e4m3
codes a [m, k] and b [n, k], both contiguous along k, and fp32 scales with the granularities of ``recipe``:
(1, 128, 128), 1x128 for a and 128x128 for b, gives bf16 without c; (1, 1, 128), 1x128 for both, adds to fp32.
On compute capability 10 it turns the scales, powers of two, into E8M0 itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mt_megatron.fp8.kernels import deep_gemm
from mt_megatron.fp8.products import _into
from mt_megatron.fp8.quantise import Quantised
from mt_megatron.fp8.recipe import Product, Role

BLOCK = 128


def deep_gemm_nt(
    role: Role,
    a: Quantised,
    b: Quantised,
    product: Product,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """``products.reference`` by DeepGEMM's kernels. The summed dimension is padded to whole blocks."""
    left, right = _contiguous(a), _contiguous(b)
    shape = (left[0].shape[0], right[0].shape[0])
    kernel = deep_gemm().fp8_gemm_nt
    if role != "wgrad":
        made = left[0].new_empty(shape, dtype=torch.bfloat16)
        kernel(left, right, made, recipe=(1, BLOCK, BLOCK))
        return _into(made.to(dtype), None, out, accumulate)
    if out is not None and accumulate and out.dtype is torch.float32 and out.is_contiguous():
        kernel(left, right, out, c=out, recipe=(1, 1, BLOCK))
        return out
    total = left[0].new_zeros(shape, dtype=torch.float32)
    kernel(left, right, total, c=total, recipe=(1, 1, BLOCK))
    return total.to(dtype) if out is None else _into(total, None, out, accumulate)


def _contiguous(operand: Quantised) -> tuple[Tensor, Tensor]:
    """Codes [rows, summed] and scales, contiguous along the summed dimension."""
    codes, scales = operand.laid().view(torch.uint8), operand.inverse
    missing = -codes.shape[1] % BLOCK
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    return codes.view(operand.codes.dtype), (scales.t() if operand.along == 0 else scales).contiguous()
