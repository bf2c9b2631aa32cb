"""Where a series of steps changes its level: binary segmentation on clipped values.

After the circular binary segmentation idea of Olshen et al. (Biostatistics 5, 2004), with clipped
values instead of a permutation test: the clipping bounds what a wild step can contribute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .robust import CLIP, Floats, noise

SPLIT = 4.2
"""Standard errors by which two neighbouring levels must differ. Noise alone splits a long series at times:
whether a stretch is raised is another question, with a bar of its own."""

SHORTEST = 4
"""Steps of the shortest stretch that may have a level of its own."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Neighbouring steps of one level: positions ``start`` to ``stop - 1``."""

    start: int
    stop: int
    level: float
    """Median of the values."""


def stretches(series: Floats, *, floor: float = 0.0, shortest: int = SHORTEST) -> list[Stretch]:
    """Cut ``series`` [steps] into stretches of one level each, in order; NaN values belong to none's level.

    ``floor``: the least standard deviation believed, so that tiny shifts of quiet series are no change.
    """
    present = np.flatnonzero(~np.isnan(series))
    if not len(present):
        return []
    values = series[present]
    deviation = max(noise(values), floor, 1e-12)
    cuts = [0, *sorted(_cuts(values, deviation, shortest)), len(values)]
    found = []
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        found.append(
            Stretch(
                start=int(present[start]) if start else 0,
                stop=int(present[stop - 1]) + 1,
                level=float(np.median(values[start:stop])),
            )
        )
    return found


def _cuts(values: Floats, deviation: float, shortest: int) -> list[int]:
    cuts: list[int] = []
    todo = [(0, len(values))]
    while todo:
        start, stop = todo.pop()
        at = _best_cut(values[start:stop], deviation, shortest)
        if at is not None:
            cuts.append(start + at)
            todo += [(start, start + at), (start + at, stop)]
            continue
        window = _best_window(values[start:stop], deviation, shortest)
        if window is not None:
            cuts += [start + each for each in window]
            edges = [start, *(start + each for each in window), stop]
            todo += list(zip(edges[:-1], edges[1:], strict=True))
    return cuts


def _clipped(values: Floats, deviation: float) -> Floats:
    return np.clip((values - np.median(values)) / deviation, -CLIP, CLIP)


def _best_cut(values: Floats, deviation: float, shortest: int) -> int | None:
    """The position that separates two levels best, if they differ clearly."""
    size = len(values)
    if size < 2 * shortest:
        return None
    clipped = _clipped(values, deviation)
    left = np.arange(shortest, size - shortest + 1)
    sums = np.cumsum(clipped)
    total = sums[-1]
    below = sums[left - 1]
    difference = below / left - (total - below) / (size - left)
    scores = np.abs(difference) / np.sqrt(1.0 / left + 1.0 / (size - left))
    best = int(np.argmax(scores))
    return int(left[best]) if scores[best] >= SPLIT else None


def _best_window(values: Floats, deviation: float, shortest: int) -> tuple[int, ...] | None:
    """The window inside ``values`` that stands out best: a level that comes and goes."""
    size = len(values)
    if size < 3 * shortest:
        return None
    sums = np.concatenate(([0.0], np.cumsum(_clipped(values, deviation))))
    mean = sums[-1] / size
    best, found = SPLIT, None
    length = shortest
    while length <= size // 2:
        inside = sums[length:] - sums[:-length] - mean * length
        scores = np.abs(inside) / np.sqrt(length * (1.0 - length / size))
        at = int(np.argmax(scores))
        if scores[at] > best:
            best, found = float(scores[at]), (at, at + length)
        length = max(length + 1, int(length * 1.25))
    if found is None:
        return None
    return tuple(each for each in found if 0 < each < size) or None
