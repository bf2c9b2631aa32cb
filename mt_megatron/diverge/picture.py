"""The comparison as an SVG: the error of every module along the network, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from .compare import Comparison, Entry

_LEFT, _RIGHT, _TOP, _PANEL, _GAP, _BOTTOM = 64, 24, 70, 150, 46, 30
_OK, _BAD, _GREY, _INK = "#2f6fde", "#d9480f", "#868e96", "#343a40"
_LOW = -9
"""Errors below 1e-9 are drawn there; equal to the bit is a hollow mark on that line."""

_PANELS = (
    ("forward", "forward: outputs, in execution order"),
    ("backward", "backward: gradients of outputs, computed from right to left"),
    ("parameter gradient", "gradients of parameters, reduced over all ranks"),
)


def draw(comparison: Comparison, title: str) -> str:
    """The SVG text. It has a background of its own, so that it reads on a dark page too."""
    count = max((len(_of(comparison, phase)) for phase, _ in _PANELS), default=1)
    width = max(760, min(1800, _LEFT + _RIGHT + 9 * count))
    height = _TOP + len(_PANELS) * (_PANEL + _GAP) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
        _text(_LEFT, 22, title, size=13),
        _subtitle(comparison),
    ]
    for row, (phase, words) in enumerate(_PANELS):
        top = _TOP + row * (_PANEL + _GAP)
        parts += _panel(_of(comparison, phase), words, top, width, comparison.first)
    parts.append(_legend(width, height))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _subtitle(comparison: Comparison) -> str:
    first = comparison.first
    if first is None:
        return _text(_LEFT, 40, "no difference beyond rounding", fill=_GREY)
    words = f"{first.phase} of {first.name} differs first"
    if comparison.suspect() != first.name:
        words += f"; {comparison.suspect()} computed it"
    return _text(_LEFT, 40, words, fill=_BAD)


def _of(comparison: Comparison, phase: str) -> list[Entry]:
    found = [entry for entry in comparison.entries if entry.phase == phase]
    # Gradients are listed as they are computed; along the network they stand where their module is.
    return found if phase == "forward" else found[::-1]


def _panel(entries: list[Entry], words: str, top: float, width: float, first: Entry | None) -> list[str]:
    parts = [_text(_LEFT, top - 6, words)]
    finite = [entry.error for entry in entries if 0 < entry.error < math.inf]
    high = max(1, math.ceil(math.log10(max(finite)))) if finite else 1
    bottom = top + _PANEL

    def y(error: float) -> float:
        level = high if error == math.inf else max(_LOW, math.log10(error)) if error > 0 else _LOW
        return bottom - (min(level, high) - _LOW) / (high - _LOW) * _PANEL

    def x(at: int) -> float:
        return _LEFT + 8 + (at + 0.5) * (width - _LEFT - _RIGHT - 16) / max(1, len(entries))

    for power in range(_LOW, high + 1, 3):
        line = y(10.0**power)
        parts.append(f'<path d="M{_LEFT} {line:.1f}H{width - _RIGHT}" stroke="#e9ecef"/>')
        label = "0" if power == _LOW else f"1e{power}"
        parts.append(_text(_LEFT - 6, line + 4, label, anchor="end", fill=_GREY))
    if not entries:
        parts.append(
            _text((_LEFT + width) / 2, top + _PANEL / 2, "nothing recorded", anchor="middle", fill=_GREY)
        )
        return parts
    limit = y(entries[0].tolerance)
    parts.append(f'<path d="M{_LEFT} {limit:.1f}H{width - _RIGHT}" stroke="{_GREY}" stroke-dasharray="5 4"/>')
    parts += _layers(entries, x, top, bottom)
    for at, entry in enumerate(entries):
        colour = _BAD if entry.differs else _OK
        fill = "#ffffff" if entry.error == 0 else colour
        tip = escape(f"{entry.name}: {entry.error:.3g}")
        radius = 5.5 if entry is first else 2.8
        centre = f'cx="{x(at):.1f}" cy="{y(entry.error):.1f}" r="{radius}"'
        parts.append(f'<circle {centre} fill="{fill}" stroke="{colour}"><title>{tip}</title></circle>')
        if entry is first:
            left = x(at) > width / 2
            anchor, shift = ("end", -8) if left else ("start", 8)
            upright = f'd="M{x(at):.1f} {top}V{bottom}"'
            parts.append(f'<path {upright} stroke="{_BAD}" stroke-width="0.8"/>')
            label, below = f"first: {entry.name}", y(entry.error) + 22
            parts.append(_text(x(at) + shift, below, label, anchor=anchor, fill=_BAD, halo=True))
    return parts


def _layers(entries: list[Entry], x: Callable[[int], float], top: float, bottom: float) -> list[str]:
    parts: list[str] = []
    previous = ""
    for at, entry in enumerate(entries):
        words = entry.name.split(".")
        layer = words[2] if words[:2] == ["decoder", "layers"] and len(words) > 2 else ""
        if at and layer != previous:
            middle = (x(at) + x(at - 1)) / 2
            parts.append(f'<path d="M{middle:.1f} {top}V{bottom}" stroke="#dee2e6"/>')
        if layer and layer != previous:
            parts.append(_text(x(at) - 3, bottom + 13, f"layer {layer}", fill=_GREY))
        previous = layer
    return parts


def _legend(width: float, height: float) -> str:
    words = (
        "vertical: largest error of a row, logarithmic; dashed: what is still rounding; hollow: no difference"
    )
    return _text(width / 2, height - 12, words, anchor="middle", fill=_GREY)


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    fill: str = _INK,
    size: int | None = None,
    halo: bool = False,
) -> str:
    more = f' font-size="{size}"' if size else ""
    more += ' paint-order="stroke" stroke="#ffffff" stroke-width="4"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{more}>{escape(words)}</text>'
