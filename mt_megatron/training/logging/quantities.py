"""Figures as people read them: durations, sizes, a few significant digits."""

from __future__ import annotations

import math

DASH = "-"
"""What stands where nothing is known."""


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``; days are spelt out. A dash when there is no such number."""
    if not math.isfinite(seconds):
        return DASH
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days:
        return f"{days} d {hours_of_day}:{minutes:02d}:{rest:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def significant(value: float, digits: int = 3) -> str:
    """``value`` to so many significant digits, without an exponent between 0.0001 and a million."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4 or exponent > 5:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def gibibytes(size: float) -> str:
    """Bytes in GiB, to three significant digits."""
    return significant(size / 2**30)
