"""Dtypes that a device lacks: float64, and integers in ``torch.histc``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def histc_of_any_dtype(wide: torch.dtype) -> Callable[..., torch.Tensor]:
    """``torch.histc``, also for integer tensors. They are counted as ``wide``, exactly as far as its
    integers are exact: 2**53 for float64, 2**24 for float32 (Megatron counts tokens per expert)."""

    def histc(
        input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0, **kwargs: Any
    ) -> torch.Tensor:
        if input.is_floating_point():
            return torch.histc(input, bins=bins, min=min, max=max, **kwargs)
        counts = torch.histc(input.to(wide), bins=bins, min=min, max=max, **kwargs)
        return counts.to(input.dtype)

    return histc


_HAVE_FLOAT64 = frozenset({"cpu", "cuda"})


def has_float64(device: torch.device) -> bool:
    """Whether ``device`` computes in float64. Moore Threads cards are reported to refuse it, a GEMM for
    one; of a device that is not known the same is assumed."""
    return device.type in _HAVE_FLOAT64


def wide_float(device: torch.device) -> torch.dtype:
    """The type for sums on ``device``: float64, or float32 where the device has no float64."""
    return torch.float64 if has_float64(device) else torch.float32
