"""Which devices compute in float64."""

from __future__ import annotations

import torch

_HAVE_FLOAT64 = frozenset({"cpu", "cuda"})


def has_float64(device: torch.device) -> bool:
    """Whether ``device`` computes in float64. Moore Threads cards are reported to refuse it, a GEMM for
    one; of a device that is not known the same is assumed."""
    return device.type in _HAVE_FLOAT64


def wide_float(device: torch.device) -> torch.dtype:
    """The type for sums on ``device``: float64, or float32 where the device has no float64."""
    return torch.float64 if has_float64(device) else torch.float32
