"""Matrices in 8-bit tiles, made on the device, with the largest error stated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 64
"""Columns of a tile, which is one row high; the last of a row may have fewer."""

EXACT = 4096
"""Elements up to which a tensor is sent as float32."""

_CODES = 255


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """``low + scale * code`` per tile: along the columns, n tiles for c columns have ceil(c / n) each."""

    codes: Tensor
    """uint8 [rows, columns]."""

    scale: Tensor
    """float32 [rows, tiles]."""

    low: Tensor
    """float32 [rows, tiles]; of a tile with an element that is not finite this element, NaN where they
    differ, so that the whole tile reads as not finite."""

    error: Tensor
    """float32 [], of several matrices [n]: largest absolute difference; infinite where an element is not
    finite."""


def tiles_of(values: Tensor) -> Tiles:
    """``values`` [rows, columns] of any floating dtype in tiles. Nothing waits for the device. Of several
    matrices [n, rows, columns] the rows lie one matrix after another, with an error for each.

    Within a tile codes are evenly spaced from the smallest to the largest element, so the error is at most
    half of a step of the widest tile.
    """
    wide = values.float().reshape(-1, values.size(-1))
    rows, columns = wide.shape
    count = max(1, -(-columns // TILE))
    size = max(1, -(-columns // count))
    padded = wide
    if count * size != columns:
        # What fills up the last tile repeats an element of it, so that it changes neither end.
        padded = torch.cat((wide, wide[:, -1:].expand(rows, count * size - columns)), dim=1)
    tiles = padded.reshape(rows, count, size)
    finite, wrong = tiles, torch.zeros(())
    # On another device a look at the range would wait.
    plain = tiles.device.type == "cpu" and bool(torch.isfinite(tiles.amax() - tiles.amin()))
    if not plain:
        is_finite = tiles.isfinite()
        finite = tiles.where(is_finite, 0.0)
        # 0 where all elements are finite, else their infinity, else NaN.
        wrong = tiles.where(~is_finite, 0.0).sum(dim=-1, keepdim=True)
    low, high = finite.amin(dim=-1, keepdim=True), finite.amax(dim=-1, keepdim=True)
    # Halves before the difference, which would overflow for the widest ranges.
    scale = (high / _CODES - low / _CODES).clamp_min(torch.finfo(torch.float32).tiny)
    steps = (finite - low).div_(scale)
    steps = (steps if plain else steps.nan_to_num_(posinf=_CODES)).round_().clamp_(0, _CODES)
    codes = steps.to(torch.uint8).reshape(rows, count * size)[:, :columns]
    low = low + wrong
    off = steps.mul_(scale).add_(low).sub_(tiles).reshape(*values.shape[:-2], -1)
    error = torch.maximum(off.amax(dim=-1), -off.amin(dim=-1))
    return Tiles(
        codes=codes,
        scale=scale[..., 0],
        low=low[..., 0],
        error=error.nan_to_num(nan=float("inf"), posinf=float("inf")),
    )
