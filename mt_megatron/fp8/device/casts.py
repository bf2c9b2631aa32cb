"""Choice of what casts on a device: Triton's kernels where they work, PyTorch's operations elsewhere."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mt_megatron.fp8.formats import E4M3, E5M2, encode

_log = logging.getLogger("mt_megatron")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of matrices that the kernels read."""


def kernels_for(x: Tensor) -> Any | None:
    """The module ``triton_casts`` where its kernels can read ``x``; None: PyTorch's operations."""
    return _kernels(x.device.type) if x.device.type != "cpu" and x.dtype in DTYPES else None


def contiguous(codes: Tensor) -> Tensor:
    """``codes`` (a matrix of one-byte elements) contiguous along its last dimension."""
    if codes.is_contiguous():
        return codes
    found = _kernels(codes.device.type)
    if found is None or not codes.t().is_contiguous():
        return codes.contiguous()
    made: Tensor = found.transposed(codes.t())
    return made


@cache
def _kernels(kind: str) -> Any | None:
    if kind != "cuda":
        return None
    try:
        found = importlib.import_module("mt_megatron.fp8.device.triton_casts")
    except ImportError as error:
        return _without(f"Triton cannot be imported: {error}")
    try:
        right = _agrees(found, torch.device(kind))
    except Exception as error:  # noqa: BLE001 (of Triton, its C compiler, the driver: casts work without)
        return _without(f"Triton's kernels fail: {type(error).__name__}: {error}")
    return found if right else _without("Triton's kernels give other codes than PyTorch")


def _without(why: str) -> Any | None:
    _log.warning("fp8: casts by PyTorch's operations, several passes over each tensor (%s)", why)
    return None


def _agrees(found: Any, device: torch.device) -> bool:
    """True where codes and magnitudes equal PyTorch's: rounding, subnormal numbers, limits and NaN."""
    numbers = torch.linspace(-1.0, 1.0, 40 * 70, device=device).view(40, 70).exp2().mul_(3.0).sub_(2.0)
    numbers[0], numbers[1], numbers[2, :4] = 1e-3 * numbers[0], 1e6 * numbers[1], 0.0
    x = torch.where(numbers > 5.9, -numbers, numbers).bfloat16()
    for kind, dim in ((found.ROWS, 1), (found.COLUMNS, 0)):
        if not torch.equal(found.amax(x, kind), x.abs().amax(dim=dim, keepdim=True).float()):
            return False
    x[3, 5], scale = torch.nan, torch.full((), 0.37, device=device)
    if not bool(found.amax(x, found.WHOLE).isnan()):
        return False
    for fmt in (E4M3, E5M2):
        expected = encode(x.float() * scale, fmt).float()
        for turned in (False, True):
            codes = found.cast(x, scale, fmt, found.WHOLE, turned=turned).float()
            if not torch.equal(codes.nan_to_num(9e9), expected.nan_to_num(9e9)):
                return False
    blocks = torch.rand(3, 70, device=device) + 0.5
    expected = encode(x.float() * blocks.repeat_interleave(16, 0)[:40], E4M3).float()
    codes = found.cast(x, blocks, E4M3, found.BLOCKS, turned=True, block=(16, 1)).float()
    if not torch.equal(codes.nan_to_num(9e9), expected.nan_to_num(9e9)):
        return False
    turned_bytes = x.view(torch.uint8)[:, ::2].contiguous()
    return torch.equal(found.transposed(turned_bytes), turned_bytes.t())
