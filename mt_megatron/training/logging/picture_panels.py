"""Small panels below the loss: one quantity each, over the same tokens, from 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

GRID, TEXT = "#e9ecef", "#343a40"
_LABELS = 56
_HEADING = 22
_FOOT = 22
_MOST_POINTS = 400


@dataclass(frozen=True, kw_only=True)
class Box:
    """Where a panel lies, its labels included."""

    left: float
    top: float
    width: float
    height: float


def panel(
    points: Sequence[tuple[float, float]], box: Box, *, name: str, most: float, colour: str
) -> list[str]:
    """SVG elements: ``points`` are (tokens, value), the axis reaches ``most`` tokens."""
    ceiling = max((value for _, value in points), default=0.0) or 1.0
    step = round_step(ceiling / 3)
    high = math.ceil(ceiling / step - 1e-9) * step
    left, right = box.left + _LABELS, box.left + box.width
    top, bottom = box.top + _HEADING, box.top + box.height - _FOOT

    def x(tokens: float) -> float:
        return left + tokens / most * (right - left)

    def y(value: float) -> float:
        return bottom - value / high * (bottom - top)

    parts = [words(left, box.top + 10, name, fill=colour)]
    for index in range(round(high / step) + 1):
        value = index * step
        parts.append(f'<path d="M{left:.1f} {y(value):.1f}H{right:.1f}" stroke="{GRID}"/>')
        parts.append(words(left - 8, y(value) + 4, short(value), anchor="end"))
    parts += token_ticks(x, bottom + 16, most, count=3)
    # Every so many-th of many: a line of this width shows no more.
    shown = points[:: math.ceil(len(points) / _MOST_POINTS) or 1]
    return parts + line([(x(tokens), y(value)) for tokens, value in shown], colour)


def line(points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    """A line through places; where there are few, each is marked, so that nobody takes it for more."""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    parts = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>']
    if len(points) <= 12:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]
    return parts


def token_ticks(x: Callable[[float], float], y: float, most: float, *, count: int) -> list[str]:
    """Numbers below an axis of tokens."""
    size, _ = token_unit(most)
    tick = round_step(most / count)
    return [
        words(x(index * tick), y, f"{index * tick / size:g}", anchor="middle")
        for index in range(int(most / tick + 1e-6) + 1)
    ]


def words(x: float, y: float, text: str, *, anchor: str = "start", fill: str = TEXT) -> str:
    """One line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'


def short(value: float) -> str:
    """A number for an axis: 12k instead of 12000, 0.00002 as 2e-5."""
    if value >= 1e3:
        for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= size:
                return f"{value / size:g}{sign}"
    if 0.0 < value < 1e-4:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


def token_unit(most: float) -> tuple[float, str]:
    """What the axis counts in, and its name, for a run of ``most`` tokens."""
    for size, name in ((1e12, "trillion "), (1e9, "billion "), (1e6, "million "), (1e3, "thousand ")):
        if most >= size:
            return size, name
    return 1.0, ""


def round_step(size: float) -> float:
    """1, 2 or 5 times a power of ten, not below ``size``."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= size * 0.999)
