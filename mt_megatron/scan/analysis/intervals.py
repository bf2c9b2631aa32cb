"""Unions of intervals of time, and how much of other intervals they cover."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .robust import Floats

Times = NDArray[np.int64]


class Cover:
    """The union of intervals, asked for the covered time within others."""

    def __init__(self, begin: Times, end: Times) -> None:
        """``begin`` and ``end`` [n] in ns, in any order and overlapping as they like."""
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], end[order]
        keep = end > begin
        begin, end = begin[keep], end[keep]
        self._origin = int(begin[0]) if len(begin) else 0
        if not len(begin):
            self._knots = self._covered = np.zeros(1)
            return
        latest = np.maximum.accumulate(end)
        new = np.concatenate(([True], begin[1:] > latest[:-1]))
        starts = begin[new]
        last = np.concatenate((np.flatnonzero(new)[1:] - 1, [len(begin) - 1]))
        stops = latest[last]
        lengths = (stops - starts).astype(np.float64)
        total = np.cumsum(lengths)
        knots = np.empty(2 * len(starts))
        covered = np.empty(2 * len(starts))
        knots[0::2], knots[1::2] = starts - self._origin, stops - self._origin
        covered[0::2], covered[1::2] = total - lengths, total
        self._knots, self._covered = knots, covered

    def before(self, at: Times) -> Floats:
        """Covered ns before each moment of ``at``."""
        return np.interp((at - self._origin).astype(np.float64), self._knots, self._covered)

    def within(self, begin: Times, end: Times) -> Floats:
        """Covered ns within each interval."""
        found: Floats = self.before(end) - self.before(begin)
        return found
