"""Statistics that a few wild values do not move: medians, spreads and the certainty of a level."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

SPREAD_OF_MAD = 1.4826
"""A normal distribution's standard deviation in units of its median absolute deviation."""

_FAR = 1.645
"""90 % of a normal distribution lie within so many standard deviations."""

CLIP = 3.5
"""Values count as at most this many standard deviations away: one wild step proves nothing."""


def lower_median(values: ArrayLike, axis: int = 0) -> Floats:
    """The middle value, the smaller of two: with half of the values raised still one that is not.

    NaN counts as absent. Shape as ``values`` without ``axis``; NaN where all are absent.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=axis)
    present = np.sum(~np.isnan(ordered), axis=axis, keepdims=True)
    middle = np.maximum(present - 1, 0) // 2
    return np.take_along_axis(ordered, middle, axis=axis).squeeze(axis)


def median_of_rows(rows: Floats) -> Floats:
    """Median over the rows of each column, NaN counting as absent; NaN where all are."""
    if not len(rows):
        return np.full(rows.shape[1], np.nan)
    ordered = np.sort(rows, axis=0)
    present = np.sum(~np.isnan(rows), axis=0)
    columns = np.arange(rows.shape[1])
    low, high = np.maximum(present - 1, 0) // 2, np.minimum(present // 2, len(rows) - 1)
    found: Floats = (ordered[low, columns] + ordered[high, columns]) / 2.0
    return found


def spread(values: ArrayLike) -> float:
    """Standard deviation as the median absolute deviation from the median says it; 0 for fewer than two."""
    array = present(values)
    if len(array) < 2:
        return 0.0
    return float(SPREAD_OF_MAD * np.median(np.abs(array - np.median(array))))


def noise(series: ArrayLike) -> float:
    """Standard deviation of a series about its level, even if the level jumps.

    From the differences of neighbours: their median, or with heavy tails their 90th percentile, whichever
    says more. 0 for fewer than three values.
    """
    array = present(series)
    if len(array) < 3:
        return 0.0
    middle, far = np.quantile(np.abs(np.diff(array)), [0.5, 0.9])
    return float(max(SPREAD_OF_MAD * middle, far / _FAR) / np.sqrt(2.0))


def present(values: ArrayLike) -> Floats:
    """``values`` as a flat array without NaN."""
    array = np.asarray(values, dtype=np.float64).ravel()
    return array[~np.isnan(array)]


def certainty(deviations: ArrayLike, deviation: float) -> float:
    """How many standard errors the level of ``deviations`` lies above zero, each clipped at ``CLIP``.

    ``deviation`` is one value's standard deviation. Needs many small values or several large
    ones: a single one never reaches more than ``CLIP``.
    """
    array = present(deviations)
    if not len(array):
        return 0.0
    scaled = np.clip(array / max(deviation, 1e-12), -CLIP, CLIP)
    return float(scaled.sum() / np.sqrt(len(array)))


def grouped_median(
    keys: NDArray[np.int64], values: Floats
) -> tuple[NDArray[np.int64], Floats, NDArray[np.int64]]:
    """The distinct ``keys`` ascending, the (lower) median of the ``values`` of each, and their number."""
    if not len(keys):
        return np.empty(0, dtype=np.int64), np.empty(0), np.empty(0, dtype=np.int64)
    order = np.lexsort((values, keys))
    ordered = keys[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    counts = np.diff(np.concatenate((first, [len(ordered)])))
    return ordered[first], values[order][first + (counts - 1) // 2], counts.astype(np.int64)
