"""Processes that stand still or get less than a processor: when work ends that is interrupted."""

from __future__ import annotations

import numpy as np

from .noise import Floats

PERIOD = 100e6
"""Nanoseconds in which a quota is given out anew."""


class Stops:
    """One interval per rank in which its whole process stands still; none is an empty one at infinity."""

    def __init__(self, begin: Floats, end: Floats) -> None:
        """``begin`` and ``end`` [pp, dp, cp, tp] in ns."""
        self.begin = begin
        self.end = end

    def stretch(self, begin: Floats, end: Floats, hit: tuple[Floats, Floats]) -> Floats:
        """When work ends that was to last from ``begin`` to ``end``, on ranks whose stop is ``hit``."""
        stop, resume = hit
        touched = (begin < resume) & (end > stop)
        with np.errstate(invalid="ignore"):
            return end + np.where(touched, resume - np.maximum(begin, stop), 0.0)

    def hold(self, times: Floats, hit: tuple[Floats, Floats]) -> Floats:
        """``times`` that fall into the stop moved to its end."""
        stop, resume = hit
        return np.where((times >= stop) & (times < resume), resume, times)


class Quota:
    """One rank that may compute for a part of each period; what it does not use is lost."""

    def __init__(self, share: float) -> None:
        """``share`` of a processor is kept from it."""
        self._allowed = (1 - share) * PERIOD
        self._period = -1.0
        self._used = 0.0
        self.throttled = 0.0
        """Nanoseconds it stood still for it, so far."""

    def end(self, begin: float, needed: float) -> float:
        """When ``needed`` ns of computing end that begin at ``begin``."""
        at = begin
        while True:
            period = at // PERIOD
            if period != self._period:
                self._period, self._used = period, 0.0
            left_in_period = (period + 1) * PERIOD - at
            run = min(needed, self._allowed - self._used, left_in_period)
            at, needed, self._used = at + run, needed - run, self._used + run
            if needed <= 0:
                return at
            resume = (period + 1) * PERIOD
            if at < resume:
                self.throttled += resume - at
            at = resume
