"""fp32 products by oneDNN on processors for which MKL, torch's own choice, has no kernels as good.

On AMD processors with AVX-512 MKL's sgemm reaches less than half of what oneDNN's compiled kernels do. Which
of the two runs is decided by the processor, not by a race, so that the same machine gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_LEAST_PRODUCTS = 1 << 22
"""Multiplications of the smallest product that pays for oneDNN's 12 us a call and its packing."""

_LEAST_SIDE = 16
"""Rows, columns or summands of the thinnest product that keeps its kernels busy."""

_PANEL = 1 << 20
"""Elements of a result that are made before they go to where they belong: 4 MiB."""


def suits(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` [m, k] times ``b`` [k, n] is faster there. By processor and shape alone."""
    m, k, n = *a.shape, b.shape[1]
    if min(m, k, n) < _LEAST_SIDE or m * k * n < _LEAST_PRODUCTS:
        return False
    return b.dtype is a.dtype and preferred(a)


def preferred(a: Tensor) -> bool:
    """Whether large products with ``a`` go to oneDNN: fp32 on such a processor, with oneDNN on."""
    if a.dtype is not torch.float32 or a.device.type != "cpu":
        return False
    return bool(torch.backends.mkldnn.enabled) and _processor()


@cache
def _processor() -> bool:
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            found = dict(line.split(":", 1) for line in _first_processor(lines) if ":" in line)
    except OSError:
        return False
    fields = {name.strip(): value.split() for name, value in found.items()}
    return fields.get("vendor_id") == ["AuthenticAMD"] and "avx512f" in fields.get("flags", [])


def _first_processor(lines: Any) -> Any:
    for line in lines:
        if not line.strip():
            return
        yield line


def matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
    """``a`` [m, k] times ``b`` [k, n] in fp32, written or with ``accumulate`` added to ``out`` [m, n] of any
    floating dtype and any strides; outside autograd. No temporary is larger than a panel of the result."""
    if out is None:
        return _linear(a, b.t())
    if out.stride(0) == 1 and out.stride(1) != 1:
        # The result comes in rows; those of the transposed product lie as ``out`` does.
        a, b, into = b.t(), a.t(), out.t()
    else:
        into = out
    step = max(_LEAST_SIDE, _PANEL // b.shape[1])
    for start in range(0, a.shape[0], step):
        part = into[start : start + step]
        (part.add_ if accumulate else part.copy_)(_linear(a[start : start + step], b.t()))
    return out


def _linear(a: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")
    return result
