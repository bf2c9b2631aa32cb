"""Arrays of tensor frames as rows of ``chunk``: decoding, cutting into chunks, overviews of large matrices.

A shard is kept as a matrix: all dimensions but the last are rows. Chunks hold so many rows that a window of
a large attention map is read without the rest of it. Matrices of at least ``OVERVIEW_FROM`` rows and columns
have overviews besides: blocks of 8 x 8 and 64 x 64 as peak (the value of the largest absolute value) and
mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scope.format.frames import FrameError

Floats = NDArray[np.float32]

CHUNK_BYTES = 256 * 1024
"""Of level 0, about."""

OVERVIEW_FROM = 512
"""Rows and columns from which a matrix has overviews."""

FACTOR = 8
"""One level's block over the block of the level below it, along each axis."""

LEVELS = 2
"""Levels above the data."""

_LEAST_OVERVIEW = 8
"""Rows and columns of an overview at least."""

_LARGEST_HALF = 65_504.0
_LEAST_NORMAL_HALF = 2.0**-14
_HALF_ROUNDING = 2.0**-11
"""Of a normal number, over its absolute value."""

_SUBNORMAL_ROUNDING = 2.0**-25
_LARGEST_EXPONENT = 15
_LEAST_POWER = -126
"""Of a normal float32."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "q8": np.dtype("u1"),
}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One row of the table."""

    level: int
    first: int
    rows: int
    columns: int
    data: bytes
    """Level 0: C order, in the encoding's dtype. Above: float16, first all peaks, then all means, in the
    units that ``scale`` has."""

    scale: bytes | None = None
    """Level 0: as ``low``. Above: float32, of the peaks and of the means; None in recordings from before."""

    low: bytes | None = None
    """float32 [rows of tiles that this chunk touches, tiles along a row]."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of an array of ``shape``: a scalar is 1 x 1, a vector one row."""
    if not shape:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


def tile_shape(shape: Sequence[int], tiles: Sequence[int]) -> tuple[int, ...]:
    """Elements of a tile along each axis of an array of ``shape`` that has ``tiles`` scales along it.
    Raises ``FrameError`` where no such tiles exist."""
    if len(tiles) != len(shape):
        raise FrameError(f"found scales of shape {tuple(tiles)} for data of {tuple(shape)}")
    found = []
    for elements, number in zip(shape, tiles, strict=True):
        length = -(-elements // number) if number else 0
        if length < 1 or -(-elements // length) != number:
            raise FrameError(f"found scales of shape {tuple(tiles)} for data of {tuple(shape)}")
        found.append(length)
    return tuple(found)


def decoded(
    encoding: str, data: NDArray[Any], scale: NDArray[Any] | None, low: NDArray[Any] | None
) -> Floats:
    """Values as float32, shape of ``data``. Raises ``FrameError`` for an array that is not ``encoding``'s."""
    if encoding not in _DTYPES:
        raise FrameError(f"found encoding {encoding!r}; expected one of {', '.join(_DTYPES)}")
    if data.dtype != _DTYPES[encoding]:
        raise FrameError(f"found {data.dtype} in encoding {encoding}; expected {_DTYPES[encoding]}")
    if encoding != "q8":
        return data.astype(np.float32)
    if scale is None or low is None or scale.shape != low.shape:
        raise FrameError("found 8-bit tiles without a scale and a low value for each")
    lengths = tile_shape(data.shape, scale.shape)
    spread = [_spread(each.astype(np.float32), lengths, data.shape) for each in (scale, low)]
    values: Floats = spread[1] + spread[0] * data.astype(np.float32)
    return values


def _spread(tiles: Floats, lengths: Sequence[int], shape: Sequence[int]) -> Floats:
    for axis, (length, elements) in enumerate(zip(lengths, shape, strict=True)):
        if tiles.shape[axis] != elements:
            # One entry for a whole axis broadcasts.
            tiles = tiles if tiles.shape[axis] == 1 else np.repeat(tiles, length, axis)
            tiles = tiles[(slice(None),) * axis + (slice(0, elements),)]
    return tiles


def matrix_tiles(
    scale: NDArray[Any], low: NDArray[Any], shape: Sequence[int]
) -> tuple[NDArray[Any], NDArray[Any], int]:
    """Scales and low values as matrices [rows of tiles, tiles along a row], and the rows of a row of tiles,
    for data of ``shape`` seen as a matrix. Raises ``FrameError`` where the tiles do not fit."""
    lengths = tile_shape(shape, scale.shape)
    if scale.shape != low.shape:
        raise FrameError(f"found scales of shape {scale.shape} and low values of {low.shape}")
    if not scale.ndim:
        return scale.reshape(1, 1), low.reshape(1, 1), 1
    rows, _ = matrix_shape(shape)
    wide = scale.shape[-1]
    index = np.zeros(1, np.int64)
    for elements, length, number in zip(shape[:-1], lengths[:-1], scale.shape[:-1], strict=True):
        index = (index[:, None] * number + np.arange(elements) // length).reshape(-1)
    scale, low = scale.reshape(-1, wide), low.reshape(-1, wide)
    high = max(1, int(np.searchsorted(index, index[0], side="right"))) if rows else 1
    if np.array_equal(index, np.arange(rows) // high):
        return scale, low, high
    # Tiles that begin anew within the matrix: each row gets scales of its own.
    return scale[index], low[index], 1


def chunks(
    encoding: str,
    data: NDArray[Any],
    scale: NDArray[Any] | None,
    low: NDArray[Any] | None,
    *,
    whole: Sequence[int],
    offset: Sequence[int],
    high: int = 1,
) -> Iterator[Chunk]:
    """Rows of a shard at ``offset`` within an array of shape ``whole``: level 0, then its overviews.

    ``scale`` and ``low`` are matrices, ``high`` the rows of a row of tiles, as ``matrix_tiles`` gives them.
    """
    rows, columns = matrix_shape(data.shape)
    matrix = data.reshape(rows, columns)
    per_chunk = max(1, CHUNK_BYTES // max(1, columns * data.dtype.itemsize))
    levels = overviews(whole, data.shape, offset)
    if levels:
        # Chunks of whole blocks: an overview is made of one chunk at a time.
        block = FACTOR**LEVELS
        per_chunk = max(block, per_chunk // block * block)
    made: list[list[Floats]] = [[] for _ in range(levels)]
    for first in range(0, rows, per_chunk):
        part = matrix[first : first + per_chunk]
        tiles = slice(first // high, (first + len(part) - 1) // high + 1)
        chunk = Chunk(
            level=0,
            first=first,
            rows=len(part),
            columns=columns,
            data=np.ascontiguousarray(part).tobytes(),
            scale=None if scale is None else np.ascontiguousarray(scale[tiles], "<f4").tobytes(),
            low=None if low is None else np.ascontiguousarray(low[tiles], "<f4").tobytes(),
        )
        yield chunk
        if levels:
            values = chunk_values(encoding, chunk, high)
            for level in range(1, levels + 1):
                made[level - 1].append(reduced(values, FACTOR**level))
    for level in range(1, levels + 1):
        (peaks, peak_unit), (means, mean_unit) = map(halved, np.concatenate(made[level - 1], axis=1))
        yield Chunk(
            level=level,
            first=0,
            rows=peaks.shape[0],
            columns=peaks.shape[1],
            data=np.stack([peaks, means]).astype("<f2").tobytes(),
            scale=np.array([peak_unit, mean_unit], "<f4").tobytes(),
        )


def chunk_values(encoding: str, chunk: Chunk, high: int) -> Floats:
    """Values of a chunk of level 0, float32 [rows, columns]. ``high``: rows of a row of tiles."""
    data: NDArray[Any] = np.frombuffer(chunk.data, _DTYPES[encoding]).reshape(chunk.rows, chunk.columns)
    if chunk.scale is None or chunk.low is None:
        return decoded(encoding, data, None, None)
    row = (chunk.first + np.arange(chunk.rows)) // high - chunk.first // high
    pair = [
        np.frombuffer(each, "<f4").reshape(int(row[-1]) + 1, -1)[row] for each in (chunk.scale, chunk.low)
    ]
    return decoded(encoding, data, pair[0], pair[1])


def overviews(whole: Sequence[int], shape: Sequence[int], offset: Sequence[int]) -> int:
    """Levels above the data that a shard of ``shape`` at ``offset`` has: blocks must not straddle shards."""
    rows, columns = matrix_shape(shape)
    plain = len(shape) >= 2 and all(size == 1 for size in whole[:-2])
    if not plain or min(matrix_shape(whole)) < OVERVIEW_FROM or not rows or not columns:
        return 0
    for level in range(LEVELS, 0, -1):
        block = FACTOR**level
        fits = all(
            at % block == 0 and ((at + size) % block == 0 or at + size == full)
            for at, size, full in zip(offset[-2:], shape[-2:], whole[-2:], strict=True)
        )
        if fits and min(matrix_shape(whole)) // block >= _LEAST_OVERVIEW:
            return level
    return 0


def reduced(values: Floats, block: int) -> Floats:
    """Peak and mean of blocks, [2, ceil(rows / block), ceil(columns / block)]; blocks at the ends may be
    smaller. NaN spreads to its block."""
    rows, columns = values.shape
    more = (-rows % block, -columns % block)
    padded = np.pad(values, ((0, more[0]), (0, more[1]))) if any(more) else values
    # Rows first: NumPy works on whole rows at once, and the columns that are left are few.
    tall = padded.reshape(padded.shape[0] // block, block, padded.shape[1])
    high = _over_columns(np.maximum, tall.max(axis=1), block)
    least = _over_columns(np.minimum, tall.min(axis=1), block)
    peak = np.where(np.abs(high) >= np.abs(least), high, least)
    peak = np.where(np.isnan(high), high, peak)
    with np.errstate(invalid="ignore", over="ignore"):
        total = _over_columns(np.add, tall.sum(axis=1, dtype=np.float32), block)
        count = np.outer(_counts(rows, block), _counts(columns, block))
        return np.stack([peak, total / count]).astype(np.float32, copy=False)


def halved(values: Floats) -> tuple[NDArray[np.float16], float]:
    """``values`` over a power of two, and this power: the largest finite one comes to lie between 2^14 and
    2^15, so that gradients of 1e-9 keep float16's precision as well as activations of 1e6 do."""
    largest = largest_finite(values)
    power = math.frexp(largest)[1] - _LARGEST_EXPONENT if largest else 0
    unit = math.ldexp(1.0, max(power, _LEAST_POWER))
    return (values / np.float32(unit)).astype(np.float16), unit


def unhalved(values: NDArray[np.float16], unit: float | None) -> tuple[Floats, float] | None:
    """Values that ``halved`` was given, within the absolute error that comes with them. Without a ``unit``,
    in recordings from before there was one, None where float16 had no room for the values."""
    largest = largest_finite(values)
    if unit is None:
        if not _LEAST_NORMAL_HALF <= largest < _LARGEST_HALF:
            return None
        unit = 1.0
    error = max(largest * _HALF_ROUNDING, _SUBNORMAL_ROUNDING) * unit if largest else 0.0
    return values.astype(np.float32) * np.float32(unit), error


def largest_finite(values: NDArray[Any]) -> float:
    """Largest absolute value among those that are finite; 0 where none is."""
    known = np.abs(values[np.isfinite(values)])
    return float(known.max()) if known.size else 0.0


def _over_columns(operation: np.ufunc, values: Floats, block: int) -> Floats:
    """``operation`` over blocks of columns, one column of all blocks at a time: axes of a few elements are
    slow to reduce."""
    found: Floats = values[:, 0::block].copy()
    for column in range(1, block):
        operation(found, values[:, column::block], out=found)
    return found


def _counts(elements: int, block: int) -> Floats:
    found = np.full(-(-elements // block), block, np.float32)
    if elements % block:
        found[-1] = elements % block
    return found
