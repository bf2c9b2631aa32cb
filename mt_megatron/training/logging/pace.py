"""When a line is due between two reports: early in a run, and after half a minute of silence."""

from __future__ import annotations

import time
from collections.abc import Callable

SILENCE_SECONDS = 30.0


class Pace:
    """Knows when something was last said."""

    def __init__(self, log_interval: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self._log_interval = log_interval
        self._now = now
        self._steps = 0
        self._last = now()

    def due(self, iteration: int) -> bool:
        """Whether a line is due after ``iteration``, one more step of this process; a report of its own
        says it where ``log_interval`` divides it.

        Steps 1, 2, 5, 10, 20, 50 ... before the first report, and any after ``SILENCE_SECONDS``.
        """
        self._steps += 1
        if iteration % self._log_interval == 0:
            return False
        early = self._steps < self._log_interval and str(self._steps).rstrip("0") in ("1", "2", "5")
        return early or self._now() - self._last >= SILENCE_SECONDS

    def told(self) -> None:
        """A line was shown."""
        self._last = self._now()
