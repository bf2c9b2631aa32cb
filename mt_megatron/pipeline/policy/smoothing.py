"""Smoothing of measured times that follows a step change at once."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

SMOOTHING = 0.3
"""Weight of a new value: the mean reaches back about three steps."""

JUMP = 4.0
"""Usual deviations by which a value that begins a new level is away from the mean: about 2.7 standard
deviations where values are normal."""

MEMORY = 9
"""Values whose median deviation is the usual one: a level that lasts fewer than half as many does not change
it."""


class Smoothed:
    """Exponential mean of one quantity, which starts again from a value that is far from it."""

    def __init__(self, floor: float) -> None:
        """``floor``: deviation that is usual at least, as a part of the mean."""
        self.mean = math.nan
        self._floor = floor
        self._deviations: deque[float] = deque(maxlen=MEMORY)

    def deviation(self) -> float:
        """Usual distance of a value from the mean."""
        floor = self._floor * abs(self.mean)
        return max(floor, median(self._deviations)) if self._deviations else floor

    def add(self, value: float) -> None:
        """Take in one value; NaN is left out."""
        if math.isnan(value):
            return
        if math.isnan(self.mean):
            self.mean = value
            return
        change = value - self.mean
        jumps = abs(change) > JUMP * self.deviation()
        self._deviations.append(abs(change))
        self.mean = value if jumps else self.mean + SMOOTHING * change
