"""What the views' functions share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..pack import finite, pack
from ..source import Source
from ..tiles import Tiles
from .timeline_reader import TimelineReader


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Data of a view: JSON alone, or JSON and arrays."""

    facts: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]] | None = None

    def body(self) -> bytes:
        """Bytes of the answer (``pack``, or JSON)."""
        if self.arrays is None:
            return json.dumps(finite(dict(self.facts)), separators=(",", ":"), ensure_ascii=False).encode()
        return pack(self.facts, self.arrays)


@dataclass(frozen=True, kw_only=True)
class Context:
    """One run that the page shows."""

    source: Source
    folder: Path | None = None
    """Of the run; None where there is none (a trace is read from its folder ``scan``)."""

    tiles: Tiles = field(init=False)
    bases: dict[Any, Any] = field(default_factory=dict)
    """Bases of projections by tensor and shape; a few."""

    timeline: TimelineReader = field(default_factory=TimelineReader)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiles", Tiles(self.source))


def thinned(steps: NDArray[np.int64], points: int) -> NDArray[np.int64]:
    """Indices of at most ``points`` of ``steps``: the first, the last and evenly spaced ones; of one, the
    last."""
    count = len(steps)
    if points == 1:
        return np.arange(count)[-1:]
    if count <= points:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, points).round().astype(np.int64))


def extremes(values: NDArray[np.float64], points: int) -> NDArray[np.int64]:
    """Indices of at most ``points`` of ``values``: of each stretch the smallest and the largest, and every
    first value that is not finite, so that no peak is lost."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    borders = np.linspace(0, count, max(2, points // 2) + 1).astype(np.int64)
    known = np.isfinite(values)
    low = np.where(known, values, np.inf)
    high = np.where(known, values, -np.inf)
    kept = {0, count - 1}
    for start, end in zip(borders[:-1], borders[1:], strict=True):
        if end > start:
            kept.add(int(start + low[start:end].argmin()))
            kept.add(int(start + high[start:end].argmax()))
    lost = np.flatnonzero(~known)
    if len(lost):
        kept.add(int(lost[0]))
    return np.asarray(sorted(kept), np.int64)
