"""Step times over the run, and where a step's time goes, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.findings.text import headline, time_text

from .data import CATEGORIES, Breakdown, ReportData
from .style import CAUSE_MARK, PART_CLASS

PART_NAME = {
    "compute": "compute",
    "exposed_communication": "communication that compute waits for",
    "waiting": "waiting in collectives",
    "bubble": "pipeline bubble",
    "data": "data",
    "checkpoint": "checkpoint",
    "pause": "pauses",
}
WIDE, NARROW = 1070, 370
"""Widths of a picture, CSS pixels: of a page, and of a phone, where a wide one's text could not be read."""

_LEFT, _HEIGHT, _BOTTOM = 64, 190, 26
_MOST_POINTS = 600
_MOST_ROWS = 32
_OUTLIER = 3.0


def in_both_widths(picture: Callable[[int], str]) -> str:
    """``picture`` for pages and for phones; the style sheet shows one of them. Empty where it is."""
    wide = picture(WIDE)
    return wide and f'<div class="wide">{wide}</div><div class="narrow">{picture(NARROW)}</div>'


def step_times(data: ReportData, width: int = WIDE) -> str:
    """A line of step lengths, ``width`` CSS pixels wide; the steps of every finding lie on a shaded ground
    with its letter."""
    steps = np.asarray(data.step_times.steps, dtype=np.int64)
    seconds = np.asarray(data.step_times.seconds, dtype=np.float64)
    if len(steps) < 2:
        return ""
    first, last = int(steps[0]), int(steps[-1])
    # A checkpoint every few hundred steps must not press everything else flat.
    ceiling = float(min(seconds.max(), _OUTLIER * np.median(seconds)))
    spacing = round_step(ceiling * 1.04e9 / 4) / 1e9
    ticks = [spacing * count for count in range(1 + int(np.ceil(ceiling * 1.04 / spacing)))]
    high = ticks[-1]
    right = width - 8

    def x(step: float) -> float:
        return _LEFT + (step - first) / max(1, last - first) * (right - _LEFT)

    def y(value: float) -> float:
        return 18 + (high - min(value, high)) / high * (_HEIGHT - 18 - _BOTTOM)

    parts = []
    # The causes of overlapping faults stand beside each other.
    for index, finding in enumerate(data.findings):
        begin, end = max(finding.first_step, first), min(finding.last_step, last)
        if begin > end:
            continue
        _, letter = CAUSE_MARK[finding.cause]
        broad, tall = max(2.0, x(end) - x(begin)), _HEIGHT - 18 - _BOTTOM
        parts.append(
            f'<rect class="fault" x="{x(begin):.1f}" y="18" width="{broad:.1f}" height="{tall}" '
            f'data-t="{escape(headline(finding))}\nsteps {finding.first_step}-{finding.last_step}"/>'
            f'<text class="bold" x="{x(begin) + 4 + 16 * (index % 6):.1f}" y="13">{letter}</text>'
        )
    for value in ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{right}"/>')
        name = time_text(value * 1e9) if value else "0"
        parts.append(
            f'<text class="dim" x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{name}</text>'
        )
    for tick in _ticks(first, last, 8 if width > NARROW else 4):
        parts.append(
            f'<text class="dim" x="{x(tick):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{tick}</text>'
        )
    binned = _binned(steps, seconds)
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in binned)
    parts.append(f'<polyline class="curve" points="{line}"/>')
    return (
        f'<svg viewBox="0 0 {width} {_HEIGHT}" width="{width}" role="img" '
        f'aria-label="Length of each step">{"".join(parts)}</svg>'
    )


def breakdown_rows(data: ReportData) -> list[tuple[str, tuple[float, ...], bool]]:
    """``(name, shares, is a culprit)``: all ranks together, then each rank, or of many ranks the culprits
    and the mean of each pipeline stage."""
    parts: Breakdown = data.breakdown
    if not parts.overall:
        return []
    rows = [("all ranks", parts.overall, False)]
    culprits = [rank for rank in sorted(data.verdicts) if rank in parts.ranks]
    if len(parts.ranks) <= _MOST_ROWS:
        rows += [(f"rank {rank}", parts.ranks[rank], rank in culprits) for rank in sorted(parts.ranks)]
        return rows
    rows += [(f"rank {rank}", parts.ranks[rank], True) for rank in culprits[: _MOST_ROWS // 2]]
    for stage in sorted({place.pp for place in data.places})[: _MOST_ROWS // 2]:
        members = [parts.ranks[place.rank] for place in _of_stage(data.places, stage, parts)]
        if members:
            rows.append((f"stage {stage}, mean", tuple(np.mean(members, axis=0).tolist()), False))
    return rows


def breakdown_bars(rows: Sequence[tuple[str, tuple[float, ...], bool]], width: int = WIDE) -> str:
    """A stacked bar per row; every part wide enough carries its share."""
    height, gap, left = 22, 5, 150 if width > NARROW else 90
    parts = []
    for index, (name, shares, culprit) in enumerate(rows):
        y = index * (height + gap) + (8 if index else 0)
        cls = ' class="bold"' if culprit or not index else ""
        mark = "\N{BLACK RIGHT-POINTING TRIANGLE} " if culprit else ""
        parts.append(f'<text{cls} x="{left - 10}" y="{y + 15}" text-anchor="end">{mark}{escape(name)}</text>')
        at = float(left)
        for category, share in zip(CATEGORIES, shares, strict=True):
            broad = max(0.0, share) * (width - left - 8)
            if broad < 0.3:
                continue
            text = f"{name}\n{PART_NAME[category]} {100 * share:.1f} %"
            parts.append(
                f'<rect class="{PART_CLASS[category]}" x="{at:.1f}" y="{y}" width="{broad:.1f}" '
                f'height="{height}" data-t="{escape(text)}"/>'
            )
            at += broad
    total = len(rows) * (height + gap) + 8
    return (
        f'<svg viewBox="0 0 {width} {total}" width="{width}" role="img" '
        f'aria-label="Where the time of a step goes">{"".join(parts)}</svg>'
    )


def breakdown_legend(overall: Sequence[float]) -> str:
    """The parts that occur, with the share of all ranks together."""
    shown = [
        f'<span><svg viewBox="0 0 16 14"><rect class="{PART_CLASS[category]}" width="16" height="14"/></svg>'
        f"{PART_NAME[category]} {100 * share:.1f} %</span>"
        for category, share in zip(CATEGORIES, overall, strict=True)
        if share >= 5e-4
    ]
    return f'<div class="legend">{"".join(shown)}</div>'


def cut_off(data: ReportData) -> int:
    """How many steps are longer than the picture of the step times is high."""
    seconds = np.asarray(data.step_times.seconds, dtype=np.float64)
    return int(np.sum(seconds > _OUTLIER * np.median(seconds))) if len(seconds) else 0


def round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, not below ``rough`` (ns)."""
    power = 1.0
    while power * 10 <= rough:
        power *= 10
    return next(each * power for each in (1, 2, 5, 10) if each * power >= rough)


def _ticks(first: int, last: int, count: int) -> list[int]:
    """About ``count`` round step numbers."""
    rough = max(1, (last - first) // count)
    power = 10 ** (len(str(rough)) - 1)
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
    return list(range(-(-first // step) * step, last + 1, step))


def _of_stage(places: Sequence[Place], stage: int, parts: Breakdown) -> list[Place]:
    return [place for place in places if place.pp == stage and place.rank in parts.ranks]


def _binned(steps: np.ndarray, seconds: np.ndarray) -> list[tuple[float, float]]:
    if len(steps) <= _MOST_POINTS:
        return list(zip(steps.tolist(), seconds.tolist(), strict=True))
    pieces = zip(np.array_split(steps, _MOST_POINTS), np.array_split(seconds, _MOST_POINTS), strict=True)
    return [(float(step.mean()), float(np.median(value))) for step, value in pieces]
