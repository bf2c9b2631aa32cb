"""FP8 telemetry as a picture: one row for each operand of each linear, one column for each sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_CELL, _ROW, _LEFT, _TOP = 14, 12, 330, 74
_LOW, _HIGH = 5.0, 40.0
"""SNR in dB at both ends of the colours: about one bit, and more than e4m3 has."""

_BAR = 180
"""Width of the colour bar."""

_CHARACTER = 5.5
"""Width of a digit of a tick's label, at most."""

# From purple to yellow, distinguishable for all kinds of colour vision (viridis, five of its colours).
_COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def picture(records: Sequence[Mapping[str, Any]]) -> str:
    """An SVG of the median SNR. Cells with underflow or saturation above 1 % have a dot."""
    steps = sorted({record["step"] for record in records})
    rows = sorted({(record["linear"], record["role"], record["operand"]) for record in records}, key=_order)
    column = {step: index for index, step in enumerate(steps)}
    line = {row: index for index, row in enumerate(rows)}
    bottom = _TOP + _ROW * len(rows)
    width, height = max(_LEFT + _CELL * len(steps) + 40, 480), bottom + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="9">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="8" y="18" font-size="13">'
        f"FP8 casts: median SNR, dB (steps {steps[0]} to {steps[-1]})</text>",
    ]
    parts += _colour_bar()
    for row, index in line.items():
        y = _TOP + _ROW * index
        parts.append(f'<text x="8" y="{y + 9}">{escape(f"{row[0]}: {row[2]} of {row[1]}")}</text>')
        parts.append(f'<line x1="{_LEFT - 4}" y1="{y + 5.5}" x2="{_LEFT}" y2="{y + 5.5}" stroke="black"/>')
        if index and row[0] != rows[index - 1][0]:
            # One linear from the next.
            parts.append(f'<line x1="8" y1="{y - 0.5}" x2="{_LEFT - 6}" y2="{y - 0.5}" stroke="#bbb"/>')
    for step in ticks(steps):
        x = _LEFT + _CELL * column[step] + (_CELL - 1) / 2
        for end, label in ((_TOP - 2, _TOP - 8), (bottom + 2, bottom + 15)):
            away = -4 if label < end else 4
            parts.append(f'<line x1="{x}" y1="{end}" x2="{x}" y2="{end + away}" stroke="black"/>')
            parts.append(f'<text x="{x}" y="{label}" text-anchor="middle" class="step">{step}</text>')
    middle = _LEFT + _CELL * len(steps) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 30}" text-anchor="middle">step</text>')
    for record in records:
        x = _LEFT + _CELL * column[record["step"]]
        y = _TOP + _ROW * line[record["linear"], record["role"], record["operand"]]
        share = (record["snr"] - _LOW) / (_HIGH - _LOW)
        title = f"step {record['step']}: {record['snr']:.1f} dB"
        parts.append(
            f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_ROW - 1}" fill="{_colour(share)}">'
            f"<title>{escape(title)}</title></rect>"
        )
        if max(record["underflow"], record["saturation"]) > 0.01:
            parts.append(f'<circle cx="{x + 6}" cy="{y + 5}" r="2" fill="white" stroke="black"/>')
    return "\n".join([*parts, "</svg>\n"])


def ticks(steps: Sequence[int]) -> list[int]:
    """The sampled steps that are labelled: every one, every second, fifth, tenth and so on, as many as fit
    beside one another."""
    wide = max(len(str(step)) for step in steps) * _CHARACTER + 6
    every = next(
        factor * 10**power
        for power in range(len(str(len(steps))) + 4)
        for factor in (1, 2, 5)
        if factor * 10**power * _CELL >= wide
    )
    return list(steps[::every])


def _colour_bar() -> list[str]:
    """The colours with ticks every 5 dB, and what a dot means."""
    count = 60
    parts = [
        f'<rect x="{8 + _BAR / count * index:g}" y="26" width="{_BAR / count + 0.2:g}" height="8" '
        f'fill="{_colour(index / (count - 1))}"/>'
        for index in range(count)
    ]
    for value in range(int(_LOW), int(_HIGH) + 1, 5):
        x = 8 + _BAR * (value - _LOW) / (_HIGH - _LOW)
        parts.append(f'<line x1="{x:g}" y1="34" x2="{x:g}" y2="38" stroke="black"/>')
        parts.append(f'<text x="{x:g}" y="47" text-anchor="middle" class="snr">{value}</text>')
    parts.append(f'<text x="{_BAR + 20}" y="34">dB; beyond either end as at the end</text>')
    parts.append(f'<text x="{_BAR + 20}" y="47">a dot: more than 1 % underflows or saturates</text>')
    return parts


def _order(row: tuple[str, str, str]) -> tuple[float, str, str, str]:
    _, _, rest = row[0].partition(".")
    layer = rest.partition(".")[0]
    # The output layer comes after all others.
    return (int(layer) if layer else math.inf, *row)


def _colour(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(_COLOURS) - 1)
    low = min(int(place), len(_COLOURS) - 2)
    mixed = (
        round(a + (b - a) * (place - low)) for a, b in zip(_COLOURS[low], _COLOURS[low + 1], strict=True)
    )
    return "#" + "".join(f"{each:02x}" for each in mixed)
