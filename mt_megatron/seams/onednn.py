"""fp32 products by oneDNN on processors for which MKL, torch's own choice, has no kernels as good.

On AMD processors with AVX-512 MKL's sgemm reaches less than half of what oneDNN's compiled kernels do. Which
of the two runs is decided by the processor, not by a race, so that the same machine gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .gemm import GemmRole


def preferred(a: Tensor) -> bool:
    """Whether products with ``a`` should go to oneDNN: fp32 on such a processor, with oneDNN on."""
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


def product(
    role: GemmRole, a: Tensor, b: Tensor, *, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """``seams.gemm.gemm`` of two fp32 operands; outside autograd."""
    if role == "dgrad":
        b = b.t()
    elif role == "wgrad":
        a, b = a.t(), b.t()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)
