"""Level of detail of recorded matrices: tiles of 256 x 256 cells, each cell of level L a block of 2^L x 2^L
elements, as 8-bit codes with a scale of their own.

Coarse levels are made of the recording's own overviews (blocks of 8 x 8), fine ones of the window that the
tile shows: an attention map of 8,192 tokens is never read as a whole.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.host.bounds import Recent

from .source import By, Matrix, Source, TensorFacts

TILE = 256
"""Cells of a side."""

INFINITE, NOT_A_NUMBER = 254, 255
"""Codes that are no values."""

_LAST_CODE = 253

CACHE_BYTES = 64 * 2**20
"""Overviews that a server keeps."""

COARSE_LEVEL = 3
"""From this level on tiles are cut out of an overview of the whole matrix: of 8,192 x 8,192 elements
4 MiB."""

WHOLE = 512
"""A matrix of less rows or columns has no stored overview; it is small along that axis at least."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One tile."""

    codes: NDArray[np.uint8]
    low: float
    scale: float
    rows: int
    """Of the whole level."""

    columns: int
    error: float
    """Of the recording's encoding and of these codes."""

    missing: float
    perturbed: str | None


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix; a vector is one row."""
    if not shape:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


def pooled(values: NDArray[np.float32], block: int, by: By) -> NDArray[np.float32]:
    """Blocks of ``block`` (a power of two) rows and columns as one value; those at the end may be smaller."""
    return _pool(_pool(values, block, 0, by), block, 1, by) if block > 1 else values


def _pool(values: NDArray[np.float32], block: int, axis: int, by: By) -> NDArray[np.float32]:
    """Blocks along ``axis`` as one; the last may be shorter."""
    length = values.shape[axis]
    whole = length // block * block
    parts = []
    if whole:
        head = values[:whole] if axis == 0 else values[:, :whole]
        parts.append(_halved(head, block, axis) if by == "max" else _mean(head, block, axis))
    if whole < length:
        tail = values[whole:] if axis == 0 else values[:, whole:]
        parts.append(_largest(tail, axis) if by == "max" else tail.mean(axis=axis, keepdims=True))
    found: NDArray[np.float32] = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)
    return found


def _halved(values: NDArray[np.float32], block: int, axis: int) -> NDArray[np.float32]:
    """Pairs again and again: several times as fast as a reduction over a short axis."""
    while block > 1:
        one, other = (values[0::2], values[1::2]) if axis == 0 else (values[:, 0::2], values[:, 1::2])
        values = _larger(one, other)
        block //= 2
    return values


def _larger(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    """The one of the larger absolute value, element by element; NaN before all."""
    with np.errstate(invalid="ignore"):
        wins = (np.abs(one) >= np.abs(other)) | np.isnan(one)
    found: NDArray[np.float32] = np.where(wins, one, other)
    return found


def _largest(values: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    pieces = np.split(values, values.shape[axis], axis=axis)
    found = pieces[0]
    for piece in pieces[1:]:
        found = _larger(found, piece)
    return found


def _mean(values: NDArray[np.float32], block: int, axis: int) -> NDArray[np.float32]:
    rows, columns = values.shape
    shaped = (
        values.reshape(rows // block, block, columns)
        if axis == 0
        else values.reshape(rows, columns // block, block)
    )
    found: NDArray[np.float32] = shaped.mean(axis=1 if axis == 0 else 2, dtype=np.float32)
    return found


def quantised(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], float, float]:
    """Codes, low and scale: value = low + scale * code, within half a scale; codes over 253 are no values."""
    finite = np.isfinite(values)
    all_finite = bool(finite.all())
    known = values if all_finite else values[finite]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    scale = (high - low) / _LAST_CODE
    codes = np.zeros(values.shape, np.uint8)
    if scale > 0:
        scaled = (np.nan_to_num(values).astype(np.float64) - low) / scale + 0.5
        codes = np.clip(scaled, 0, _LAST_CODE).astype(np.uint8)
    if not all_finite:
        codes[np.isinf(values)] = INFINITE
        codes[np.isnan(values)] = NOT_A_NUMBER
    return codes, low, scale


class Tiles:
    """Tiles of a source's tensors, out of a bounded cache of overviews."""

    def __init__(self, source: Source, most_bytes: int = CACHE_BYTES) -> None:
        self._source = source
        self._kept: Recent[Hashable, Matrix] = Recent(most_bytes)
        self._lock = threading.Lock()
        self._reading: dict[Hashable, threading.Lock] = {}

    def tile(
        self,
        facts: TensorFacts,
        step: int,
        *,
        level: int,
        row: int,
        column: int,
        by: By,
    ) -> Tile:
        """Tile (``row``, ``column``) of ``level``. Raises ``KeyError`` for one that there is not."""
        all_rows, all_columns = matrix_shape(facts.shape_at(step))
        block = 1 << level
        rows, columns = -(-all_rows // block), -(-all_columns // block)
        first, left = row * TILE, column * TILE
        if first >= rows or left >= columns:
            raise KeyError(f"found no tile {row}, {column} of level {level}")
        if level >= COARSE_LEVEL and min(all_rows, all_columns) >= WHOLE:
            whole = self.overview(facts, step, level, by)
            cells = whole.values[first : first + TILE, left : left + TILE]
        else:
            whole = self._source.window(
                facts.name,
                step,
                (first * block, min((first + TILE) * block, all_rows)),
                (left * block, min((left + TILE) * block, all_columns)),
            )
            cells = pooled(whole.values, block, by)
        codes, low, scale = quantised(cells)
        return Tile(
            codes=codes,
            low=low,
            scale=scale,
            rows=rows,
            columns=columns,
            error=whole.error + scale / 2,
            missing=whole.missing,
            perturbed=whole.perturbed,
        )

    def overview(self, facts: TensorFacts, step: int, level: int, by: By) -> Matrix:
        """The whole matrix on ``level``; several threads that ask for one at once read it once."""
        key = (facts.name, step, facts.stamp(step), level, by)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                return found
            own = self._reading.setdefault(key, threading.Lock())
        try:
            with own:
                with self._lock:
                    found = self._kept.get(key)
                if found is None:
                    found = self._source.overview(facts.name, step, 1 << level, by)
                    with self._lock:
                        self._kept.put(key, found, found.values.nbytes + 1_024)
                return found
        finally:
            with self._lock:
                self._reading.pop(key, None)


def level_for(shape: tuple[int, ...], side: int) -> int:
    """The first level on which a tensor fits into ``side`` x ``side`` cells."""
    longest = max(*matrix_shape(shape), 1)
    return max(0, math.ceil(math.log2(longest / side)))


def padded(cells: NDArray[Any], side: int) -> NDArray[Any]:
    """``cells`` in the upper left of ``side`` x ``side``."""
    found = np.zeros((side, side), cells.dtype)
    found[: cells.shape[0], : cells.shape[1]] = cells[:side, :side]
    return found
