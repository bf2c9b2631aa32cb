"""Largest magnitudes, casts and transpositions of whole matrices, one pass each, by Triton.

PyTorch's own operations write and read several fp32 copies of a tensor for one cast, and transpose bytes far
below a device's bandwidth. Codes and magnitudes are those of ``quantise`` on the same device, bit for bit.
Importing this module needs Triton, whose compiler takes annotations of kernels for constants only.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_megatron.fp8.formats import Format

WHOLE, ROWS, COLUMNS, BLOCKS = 0, 1, 2, 3
"""Extent of a scale: the matrix, a row, a column, a block."""

# Rows and columns of a program's tile, the fastest of three each on an H200 (16,384 x 7,168 bf16).
_CAST_TILE = (16, 256)
_TURNED_CAST_TILE = (64, 64)
_AMAX_TILE = (8, 1024)
_COLUMN_AMAX_TILE = (128, 64)
_TURN_TILE = (128, 128)


@triton.jit
def _tile(rows, columns, DOWN: tl.constexpr, RIGHT: tl.constexpr):
    """Rows and columns of this program's tile, of 64 bits for the products with strides, and its mask."""
    tile = tl.program_id(0)
    across = tl.cdiv(columns, RIGHT)
    row = (tile // across).to(tl.int64) * DOWN + tl.arange(0, DOWN)
    column = (tile % across).to(tl.int64) * RIGHT + tl.arange(0, RIGHT)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return row, column, inside


@triton.jit
def _amax_kernel(
    x,
    found,
    rows,
    columns,
    down,
    right,
    KIND: tl.constexpr,
    DOWN: tl.constexpr,
    RIGHT: tl.constexpr,
):
    row, column, inside = _tile(rows, columns, DOWN, RIGHT)
    values = tl.load(x + row[:, None] * down + column[None, :] * right, mask=inside, other=0.0)
    # Bits of magnitudes are ordered as the magnitudes are, infinity and then NaN at the end.
    bits = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if KIND == 1:
        tl.atomic_max(found + row, tl.max(bits, axis=1), mask=row < rows, sem="relaxed")
    elif KIND == 2:
        tl.atomic_max(found + column, tl.max(bits, axis=0), mask=column < columns, sem="relaxed")
    else:
        tl.atomic_max(found, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")


@triton.jit
def _cast_kernel(
    x,
    codes,
    scale,
    rows,
    columns,
    down,
    right,
    scale_down,
    scale_right,
    KIND: tl.constexpr,
    BLOCK_DOWN: tl.constexpr,
    BLOCK_RIGHT: tl.constexpr,
    MAXIMUM: tl.constexpr,
    TURNED: tl.constexpr,
    DOWN: tl.constexpr,
    RIGHT: tl.constexpr,
):
    row, column, inside = _tile(rows, columns, DOWN, RIGHT)
    values = tl.load(x + row[:, None] * down + column[None, :] * right, mask=inside, other=0.0)
    values = values.to(tl.float32)
    if KIND == 1:
        values = values * tl.load(scale + row * scale_down, mask=row < rows, other=1.0)[:, None]
    elif KIND == 2:
        values = values * tl.load(scale + column * scale_right, mask=column < columns, other=1.0)[None, :]
    elif KIND == 3:
        of_row, of_column = row // BLOCK_DOWN, column // BLOCK_RIGHT
        where = of_row[:, None] * scale_down + of_column[None, :] * scale_right
        values = values * tl.load(scale + where, mask=inside, other=1.0)
    else:
        values = values * tl.load(scale)
    values = tl.clamp(values, -MAXIMUM, MAXIMUM, propagate_nan=tl.PropagateNan.ALL)
    made = values.to(codes.dtype.element_ty)
    if TURNED:
        where = column[:, None] * rows + row[None, :]
        tl.store(codes + where, tl.trans(made), mask=(column < columns)[:, None] & (row < rows)[None, :])
    else:
        tl.store(codes + row[:, None] * columns + column[None, :], made, mask=inside)


@triton.jit
def _turn_kernel(x, made, rows, columns, DOWN: tl.constexpr, RIGHT: tl.constexpr):
    row, column, inside = _tile(rows, columns, DOWN, RIGHT)
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0)
    where = column[:, None] * rows + row[None, :]
    tl.store(made + where, tl.trans(values), mask=(column < columns)[:, None] & (row < rows)[None, :])


def amax(x: Tensor, kind: int) -> Tensor:
    """fp32 largest magnitudes of a matrix (bf16, fp16 or fp32): a scalar, [rows, 1] or [1, columns]. NaN and
    infinity come through."""
    rows, columns = x.shape
    shape = {WHOLE: (), ROWS: (rows, 1), COLUMNS: (1, columns)}[kind]
    found = torch.zeros(shape, dtype=torch.int32, device=x.device)
    if x.numel():
        tile = _COLUMN_AMAX_TILE if kind == COLUMNS else _AMAX_TILE
        with _device_of(x):
            _amax_kernel[_grid(x, tile)](x, found, rows, columns, *x.stride(), kind, *tile)
    return found.view(torch.float32)


def cast(
    x: Tensor, scale: Tensor, fmt: Format, kind: int, *, turned: bool, block: tuple[int, int] = (1, 1)
) -> Tensor:
    """Codes [rows, columns] of a matrix (bf16, fp16 or fp32) times its scales: a scalar, [rows, 1],
    [1, columns], or one per ``block``. Contiguous along rows, or with ``turned`` along columns."""
    rows, columns = x.shape
    assert fmt.dtype is not None
    made = torch.empty((columns, rows) if turned else (rows, columns), dtype=fmt.dtype, device=x.device)
    if x.numel():
        tile = _TURNED_CAST_TILE if turned else _CAST_TILE
        # The stride of a dimension that scales share is 0: dimensions of one element have no own.
        steps = (scale.stride(0), scale.stride(1)) if scale.dim() == 2 else (0, 0)
        with _device_of(x):
            _cast_kernel[_grid(x, tile)](
                x, made, scale, rows, columns, *x.stride(), *steps, kind, *block, fmt.maximum, turned, *tile
            )
    return made.t() if turned else made


def transposed(codes: Tensor) -> Tensor:
    """Contiguous transposition of a contiguous matrix of one-byte elements."""
    rows, columns = codes.shape
    made = torch.empty((columns, rows), dtype=torch.uint8, device=codes.device)
    if codes.numel():
        with _device_of(codes):
            _turn_kernel[_grid(codes, _TURN_TILE)](codes.view(torch.uint8), made, rows, columns, *_TURN_TILE)
    return made.view(codes.dtype)


def _device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whichever the tensor is on."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _grid(x: Tensor, tile: tuple[int, int]) -> tuple[int]:
    return (triton.cdiv(x.shape[0], tile[0]) * triton.cdiv(x.shape[1], tile[1]),)
