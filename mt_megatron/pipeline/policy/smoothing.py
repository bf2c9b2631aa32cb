"""Smoothing of measured times that follows a step change at once."""

from __future__ import annotations

import math

SMOOTHING = 0.3
"""Weight of a new value: the mean reaches back about three steps."""

JUMP = 4.0
"""Deviations from the mean, in mean absolute ones, at which a value counts as a new level."""

CONFIRMATIONS = 1
"""Values in a row, on one side, that make a new level: a single one may be a hiccup of one message."""


class Smoothed:
    """Exponential mean of one quantity. After ``CONFIRMATIONS`` values in a row that jump to one side it starts
    again from their mean."""

    def __init__(self, floor: float) -> None:
        """``floor``: deviation below which no value counts as a jump, as a part of the mean."""
        self.mean = math.nan
        self._floor = floor
        self._deviation = 0.0
        self._jumped: list[float] = []

    def add(self, value: float) -> None:
        """Take in one value; NaN is left out."""
        if math.isnan(value):
            return
        if math.isnan(self.mean):
            self.mean = value
            return
        change = value - self.mean
        limit = JUMP * max(self._deviation, self._floor * abs(self.mean))
        if abs(change) > limit:
            if self._jumped and (self._jumped[-1] > self.mean) != (change > 0):
                self._jumped = []
            self._jumped.append(value)
            if len(self._jumped) >= CONFIRMATIONS:
                self.mean = sum(self._jumped) / len(self._jumped)
                self._deviation = 0.0
                self._jumped = []
            return
        self._jumped = []
        self.mean += SMOOTHING * change
        self._deviation += SMOOTHING * (abs(change) - self._deviation)
