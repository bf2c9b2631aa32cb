"""The timeline around an event as SVG: a row per rank, what it did, and where it only waited."""

from __future__ import annotations

from bisect import bisect_right
from html import escape

from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.findings.text import time_text

from .charts import NARROW, WIDE, round_step
from .data import Bar, BarKind, Excerpt
from .style import BAR_CLASS

_ROW, _GAP, _TOP = 24, 6, 8
_LEAST_WIDTH = 0.35
_THIN: frozenset[BarKind] = frozenset(("collective", "p2p", "wait"))
_NAMES: dict[BarKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "data": "data",
    "checkpoint": "checkpoint",
    "pause": "pause",
    "collective": "collective, moving",
    "p2p": "transfer between stages",
    "wait": "waiting for another rank",
}


def timeline(excerpt: Excerpt, places: dict[int, Place], length: int, width: int = WIDE) -> str:
    """``length``: ns that the full ``width`` (CSS pixels) stands for, so that excerpts can be compared."""
    height = _TOP + len(excerpt.rows) * (_ROW + _GAP) + 30
    # A phone shows which rank it is; where that lies is in the grid.
    left, right = (178 if width > NARROW else 70), width - 10
    scale = (right - left) / max(1, length)
    parts = _axis(length, scale, height, left, right)
    for index, row in enumerate(excerpt.rows):
        y = _TOP + index * (_ROW + _GAP)
        culprit = " culprit" if row.culprit else ""
        parts.append(f'<rect class="ground{culprit}" x="0" y="{y}" width="{right}" height="{_ROW}"/>')
        place = places.get(row.rank)
        where = f"dp{place.dp} pp{place.pp} tp{place.tp}" if place and width > NARROW else ""
        bold = ' class="bold"' if row.culprit else ""
        mark = "\N{BLACK RIGHT-POINTING TRIANGLE} " if row.culprit else ""
        parts.append(
            f'<text{bold} x="8" y="{y + 16}">{mark}rank {row.rank}</text>'
            f'<text class="dim" x="{left - 8}" y="{y + 16}" text-anchor="end">{where}</text>'
        )
        parts += _bars(row.bars, y, scale, left)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(excerpt.title)}">{"".join(parts)}</svg>'
    )


def legend(excerpts: tuple[Excerpt, ...]) -> str:
    """Only the kinds that occur."""
    there = {bar.kind for excerpt in excerpts for row in excerpt.rows for bar in row.bars}
    shown = [
        f'<span><svg viewBox="0 0 16 14"><rect class="{BAR_CLASS[kind]}" width="16" height="14"/></svg>'
        f"{name}</span>"
        for kind, name in _NAMES.items()
        if kind in there
    ]
    return f'<div class="legend">{"".join(shown)}</div>'


def _bars(bars: tuple[Bar, ...], y: int, scale: float, left: int) -> list[str]:
    parts = []
    passes = sorted((bar.begin, bar.end) for bar in bars if bar.kind not in _THIN)
    begins = [begin for begin, _ in passes]
    for bar in sorted(bars, key=lambda each: (each.kind in _THIN, each.kind == "wait", each.begin)):
        width = (bar.end - bar.begin) * scale
        if width < _LEAST_WIDTH:
            continue
        # Communication within a pass lies in its lower half, any other fills the row.
        before = bisect_right(begins, bar.begin) - 1
        within = bar.kind in _THIN and before >= 0 and passes[before][1] > bar.begin
        top, height = (y + 10, _ROW - 10) if within else (y, _ROW)
        text = f"{bar.text}\n{time_text(bar.end - bar.begin)}"
        parts.append(
            f'<rect class="{BAR_CLASS[bar.kind]}" x="{left + bar.begin * scale:.2f}" y="{top}" '
            f'width="{width:.2f}" height="{height}" data-t="{escape(text)}"/>'
        )
    return parts


def _axis(length: int, scale: float, height: int, left: int, right: int) -> list[str]:
    step = round_step(length / (8 if right > NARROW else 3))
    parts = []
    tick = 0
    while tick * step <= length:
        x = left + tick * step * scale
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{height - 24}"/>')
        anchor = "start" if tick == 0 else "end" if x > right - 24 else "middle"
        parts.append(
            f'<text class="dim" x="{x:.1f}" y="{height - 8}" text-anchor="{anchor}">'
            f"{time_text(tick * step) if tick else '0'}</text>"
        )
        tick += 1
    return parts
