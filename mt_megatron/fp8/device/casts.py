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
    # Tensors of other classes, fake ones among them, may have no memory to read.
    plain = type(x) in (Tensor, torch.nn.Parameter)
    return _kernels(x.device.type) if plain and x.device.type != "cpu" and x.dtype in DTYPES else None


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
    except Exception as error:  # noqa: BLE001 (a half-installed Triton raises what it likes)
        return _without(f"Triton cannot be imported: {error}")
    try:
        with torch.no_grad():
            right = _agrees(found, torch.device(kind))
    except Exception as error:  # noqa: BLE001 (of Triton, its C compiler, the driver: casts work without)
        return _without(f"Triton's kernels fail: {type(error).__name__}: {error}")
    return found if right else _without("Triton's kernels give other codes than PyTorch")


def _without(why: str) -> Any | None:
    _log.warning("fp8: casts by PyTorch's operations, several passes over each tensor (%s)", why)
    return None


def _agrees(found: Any, device: torch.device) -> bool:
    """True where codes and magnitudes equal PyTorch's: rounding, subnormal numbers, limits and NaN.

    Sizes are multiples of 16, as those of a model are: Triton compiles kernels of their own for them. No
    numbers are drawn, since that would move the random stream of a run.
    """
    rows, columns = 48, 64
    x = torch.linspace(-1.0, 1.0, rows * columns, dtype=torch.float32, device=device).view(rows, columns)
    x = x.exp2().mul_(3.0).sub_(2.0)
    x[0].mul_(1e-3)
    x[1].mul_(1e6)
    x[2, :4] = 0.0
    x[::3].neg_()
    x = x.bfloat16()
    for kind, dim in ((found.ROWS, 1), (found.COLUMNS, 0)):
        if not torch.equal(found.amax(x, kind), x.abs().amax(dim=dim, keepdim=True).float()):
            return False
    x[3, 5] = torch.nan
    if not bool(found.amax(x, found.WHOLE).isnan()):
        return False
    scales = torch.linspace(0.3, 1.7, rows * columns, dtype=torch.float32, device=device)
    by_kind = {
        found.WHOLE: (scales[7].clone(), scales[7]),
        found.ROWS: (scales[:rows, None].contiguous(), scales[:rows, None]),
        found.COLUMNS: (scales[None, :columns].contiguous(), scales[None, :columns]),
        found.BLOCKS: (scales[: 3 * columns].view(3, columns), None),
    }
    for kind, (scale, spread) in by_kind.items():
        # As casts ask for it: each block is a compilation of its own.
        block = (16, 1) if kind == found.BLOCKS else (1, 1)
        spread = scale.repeat_interleave(16, 0) if spread is None else spread
        for fmt in (E4M3, E5M2) if kind == found.WHOLE else (E4M3,):
            expected = encode(x.float() * spread, fmt).float()
            for turned in (False, True):
                codes = found.cast(x, scale, fmt, kind, turned=turned, block=block).float()
                if not torch.equal(codes.nan_to_num(9e9), expected.nan_to_num(9e9)):
                    return False
    some_bytes = x.view(torch.uint8)[:, ::2].contiguous()
    return torch.equal(found.transposed(some_bytes), some_bytes.t())
