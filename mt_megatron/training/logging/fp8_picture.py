"""FP8 telemetry as a picture: one row for each operand of each linear, one column for each sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_CELL, _ROW, _LEFT, _TOP = 14, 12, 330, 46
_LOW, _HIGH = 5.0, 40.0
"""SNR in dB at both ends of the colours: about one bit, and more than e4m3 has."""

# From purple to yellow, distinguishable for all kinds of colour vision (viridis, five of its colours).
_COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def picture(records: Sequence[Mapping[str, Any]]) -> str:
    """An SVG of the median SNR. Cells with underflow or saturation above 1 % have a dot."""
    steps = sorted({record["step"] for record in records})
    rows = sorted({(record["linear"], record["role"], record["operand"]) for record in records}, key=_order)
    column = {step: index for index, step in enumerate(steps)}
    line = {row: index for index, row in enumerate(rows)}
    width, height = _LEFT + _CELL * len(steps) + 20, _TOP + _ROW * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="9">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="8" y="18" font-size="13">'
        f"FP8 casts: median SNR, dB (steps {steps[0]} to {steps[-1]})</text>",
    ]
    for index in range(60):
        share = index / 59
        parts.append(f'<rect x="{8 + 3 * index}" y="26" width="3" height="8" fill="{_colour(share)}"/>')
    parts.append(
        f'<text x="194" y="34">{_LOW:g} to {_HIGH:g} dB; a dot: more than 1 % lost at one end</text>'
    )
    for row, index in line.items():
        y = _TOP + _ROW * index + 9
        parts.append(f'<text x="8" y="{y}">{escape(f"{row[0]}: {row[2]} of {row[1]}")}</text>')
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
