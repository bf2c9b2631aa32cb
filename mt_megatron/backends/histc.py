"""``torch.histc`` of integers, which CUDA counts and other devices' kernels refuse."""

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
