"""Pictures of the report as SVG: lines, small lines, heat maps as embedded PNG."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scope.recording.data import Floats, Integers

from .gather import HeatMap, Line

WIDE = 1064
"""Width of a picture, CSS pixels."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 10, 24

# Viridis (Smith and van der Walt, 2015) at nine places: lightness grows evenly.
_VIRIDIS = np.array(
    [
        (68, 1, 84),
        (71, 44, 122),
        (59, 81, 139),
        (44, 113, 142),
        (33, 144, 141),
        (39, 173, 129),
        (92, 200, 99),
        (170, 220, 50),
        (253, 231, 37),
    ],
    np.float64,
)
_NOT_FINITE = (213, 94, 0)

MISSING_CODE, NOT_FINITE_CODE = 0, 255
"""Colour numbers of a heat map for cells without a value and for those that are not finite."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Marks that are drawn behind lines."""

    perturbed: Sequence[tuple[int, int]] = ()
    """First and last steps."""

    alerts: Sequence[int] = ()
    bookmarks: Sequence[int] = ()
    sessions: Sequence[int] = ()
    """First steps of later sessions."""


def number(value: float) -> str:
    """Four significant digits."""
    if not math.isfinite(value):
        return "not finite" if not math.isnan(value) else "-"
    if 10_000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values from ``low`` to ``high``, about ``count``."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(
    step: Integers,
    value: Floats,
    title: str,
    marks: Marks,
    *,
    height: int = 170,
    logarithmic: bool = False,
    also: Line | None = None,
) -> str:
    """A line over steps; gaps and marks where a value is not finite. Empty without two finite values.
    ``also``: a few values on the same axes, dashed with a dot each."""
    finite = np.isfinite(value) & ((value > 0) | (not logarithmic))
    if finite.sum() < 2:
        return ""
    shown = np.log10(value, where=finite, out=np.full(len(value), np.nan)) if logarithmic else value
    drawn = shown[finite] if also is None else np.append(shown[finite], also.value)
    low, high = float(np.min(drawn)), float(np.max(drawn))
    room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    low, high = low - room, high + room
    first, last = int(step[0]), int(step[-1])
    right, bottom = WIDE - _RIGHT, height - _BOTTOM

    def x(at: float) -> float:
        return _LEFT + (at - first) / max(1, last - first) * (right - _LEFT)

    def y(at: float) -> float:
        return _TOP + (high - at) / (high - low) * (bottom - _TOP)

    parts = [_behind(marks, x, first, last, bottom)]
    for tick in ticks(low, high):
        label = number(10**tick) if logarithmic else number(tick)
        parts.append(
            f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{right}"/>'
            f'<text class="dim" x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for tick in ticks(first, last, 8):
        parts.append(
            f'<text class="dim" x="{x(tick):.1f}" y="{height - 6}" text-anchor="middle">{tick:.0f}</text>'
        )
    parts.append(f'<path class="curve" d="{path(step, shown, x, y)}"/>')
    if also is not None:
        points = [(x(at), y(each)) for at, each in zip(also.step.tolist(), also.value.tolist(), strict=True)]
        parts.append(f'<path class="early" d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in points)}"/>')
        parts += [f'<circle class="also" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in points]
    parts += [
        f'<path class="broken" d="M{x(int(at)):.1f} {_TOP}l4 7h-8z"/>'
        for at in step[~np.isfinite(value)][:400]
    ]
    return (
        f'<svg viewBox="0 0 {WIDE} {height}" role="img" aria-label="{escape(title)} by step">'
        f"{''.join(parts)}</svg>"
    )


def _behind(marks: Marks, x: Callable[[float], float], first: int, last: int, bottom: float) -> str:
    parts = []
    for begin, end in marks.perturbed:
        left, right = x(max(begin, first) - 0.5), x(min(end, last) + 0.5)
        parts.append(
            f'<rect class="perturbed" x="{left:.1f}" y="{_TOP}" width="{max(1.5, right - left):.1f}" '
            f'height="{bottom - _TOP}"/>'
        )
    for kind, steps in (("alert", marks.alerts), ("bookmark", marks.bookmarks), ("session", marks.sessions)):
        parts += [
            f'<path class="{kind}" d="M{x(step):.1f} {_TOP}V{bottom}"/>'
            for step in sorted(set(steps))
            if first <= step <= last
        ]
    return "".join(parts)


def path(step: Integers, value: Floats, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """SVG path of the finite values, at most two of each pixel column: lowest and highest."""
    kept: list[tuple[float, float] | None] = []
    column, least, most = -1, math.inf, -math.inf

    def flush() -> None:
        if least <= most:
            kept.extend([(column, y(least)), (column, y(most))] if least < most else [(column, y(least))])

    for at, each in zip(step.tolist(), value.tolist(), strict=True):
        here = round(x(at))
        if here != column or not math.isfinite(each):
            flush()
            column, least, most = here, math.inf, -math.inf
        if math.isfinite(each):
            least, most = min(least, each), max(most, each)
        elif kept and kept[-1] is not None:
            kept.append(None)
    flush()
    found, pen = [], "M"
    for point in kept:
        if point is None:
            pen = "M"
            continue
        found.append(f"{pen}{point[0]:.0f} {point[1]:.1f}")
        pen = "L"
    return "".join(found)


def spark(line: Line, *, width: int = 96, height: int = 22) -> str:
    """A small line without axes; its last value stands beside it."""
    finite = np.isfinite(line.value)
    last = number(float(line.value[-1])) if len(line.value) else "-"
    broken = "" if finite.all() else '<span class="bad" title="not finite at some step">!</span>'
    if finite.sum() < 2:
        return f'<span class="last">{last}</span>{broken}'
    low, high = float(line.value[finite].min()), float(line.value[finite].max())
    first, until = int(line.step[0]), int(line.step[-1])
    scale = (high - low) or 1.0
    drawn = path(
        line.step,
        line.value,
        lambda at: 1 + (at - first) / max(1, until - first) * (width - 2),
        lambda at: height - 3 - (at - low) / scale * (height - 6),
    )
    about = f"{number(low)} to {number(high)}, steps {first} to {until}"
    return (
        f'<svg class="spark" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{about}"><title>{about}</title><path class="curve" d="{drawn}"/></svg>'
        f'<span class="last">{last}</span>{broken}'
    )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Values as colour numbers 1 to 254."""

    low: float
    high: float
    logarithmic: bool

    def codes(self, values: Floats) -> NDArray[np.uint8]:
        """Colour number of each value."""
        with np.errstate(all="ignore"):
            shown = np.log(values) if self.logarithmic else values
            low, high = (math.log(each) if self.logarithmic else each for each in (self.low, self.high))
            place = (shown - low) / ((high - low) or 1.0)
            codes = 1 + np.rint(253 * np.clip(np.nan_to_num(place, nan=0.0, neginf=0.0), 0, 1))
        found = codes.astype(np.uint8)
        found[np.isnan(values)] = MISSING_CODE
        found[np.isinf(values)] = NOT_FINITE_CODE
        return found


def scale_of(values: Floats) -> Scale | None:
    """Colours for ``values``: logarithmic where all are positive and far apart; the outermost percent of them
    saturate. None without finite values."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, high = (float(each) for each in np.quantile(finite, (0.01, 0.99)))
    if high - low <= 1e-9 * abs(high):
        # All but equal: differences as small as rounding get no colours of their own.
        low, high = float(finite.min()), max(float(finite.max()), float(finite.min()) + 1e-6 * abs(high))
    return Scale(low=low, high=high, logarithmic=bool(finite.min() > 0 and high > 10 * low))


def palette() -> NDArray[np.uint8]:
    """[256, 3]: missing, 254 of the map, not finite."""
    place = np.linspace(0, len(_VIRIDIS) - 1, 254)
    channels = [np.interp(place, np.arange(len(_VIRIDIS)), _VIRIDIS[:, channel]) for channel in range(3)]
    inner = np.rint(np.stack(channels, axis=1))
    return np.concatenate([[(0, 0, 0)], inner, [_NOT_FINITE]]).astype(np.uint8)


def png(codes: NDArray[np.uint8]) -> str:
    """An image of colour numbers as a data URL; number 0 is transparent."""
    high, wide = codes.shape

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.tobytes() for row in codes)
    whole = (
        b"\x89PNG\r\n\x1a\n"
        + piece(b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, 3, 0, 0, 0))
        + piece(b"PLTE", palette().tobytes())
        + piece(b"tRNS", b"\0")
        + piece(b"IDAT", zlib.compress(rows, 9))
        + piece(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(whole).decode()


def heat_map(found: HeatMap, marks: Marks) -> str:
    """Layers by steps; a script of the page tells the value below the pointer. Empty without values."""
    scale = scale_of(found.values)
    if scale is None:
        return ""
    count, columns = found.values.shape
    each = max(4, min(18, 320 // count))
    high = each * count
    right, height = WIDE - _RIGHT, high + _BOTTOM + 4
    every = max(1, -(-14 // each))
    labels = "".join(
        f'<text class="dim" x="{_LEFT - 6}" y="{4 + each * index + each / 2 + 4:.1f}" text-anchor="end">'
        f"{escape(label)}</text>"
        for index, label in enumerate(found.rows)
        if index % every == 0
    )
    wide = (right - _LEFT) / columns
    spots = sorted({round(index * (columns - 1) / 8) for index in range(9)})
    times = "".join(
        f'<text class="dim" x="{_LEFT + wide * (spot + 0.5):.1f}" y="{height - 6}" text-anchor="middle">'
        f"{int(found.last[spot])}</text>"
        for spot in spots
    )

    def at(step: float) -> float:
        return float(_LEFT + wide * (int(np.searchsorted(found.first, step, side="right")) - 0.5))

    first, last = int(found.first[0]), int(found.last[-1])
    lines = "".join(
        f'<path class="{kind}" d="M{at(step):.1f} 0v4"/>'
        for kind, steps in (("alert", marks.alerts), ("bookmark", marks.bookmarks))
        for step in sorted(set(steps))
        if first <= step <= last
    )
    values = base64.b64encode(np.ascontiguousarray(found.values, "<f4").tobytes()).decode()
    steps = base64.b64encode(np.ascontiguousarray(found.last, "<i4").tobytes()).decode()
    return (
        f'<svg viewBox="0 0 {WIDE} {height}" role="img" aria-label="{escape(found.title)} by layer and step">'
        f'{labels}{lines}<rect class="ground" x="{_LEFT}" y="4" width="{right - _LEFT}" height="{high}"/>'
        f'<image class="heat" x="{_LEFT}" y="4" width="{right - _LEFT}" height="{high}" '
        f'preserveAspectRatio="none" href="{png(scale.codes(found.values))}" data-rows="{count}" '
        f'data-columns="{columns}" data-values="{values}" data-steps="{steps}" '
        f'data-labels="{escape(",".join(found.rows))}"/>{times}</svg>{legend(scale)}'
    )


def legend(scale: Scale) -> str:
    """The colours from low to high."""
    ramp = png(np.arange(1, 255, dtype=np.uint8).reshape(1, -1))
    kind = ", logarithmic" if scale.logarithmic else ""
    return (
        f'<p class="legend">{number(scale.low)} <img class="ramp" alt="dark to light" src="{ramp}"> '
        f'{number(scale.high)}{kind} <span class="swatch bad"></span> not finite '
        '<span class="swatch none"></span> no value</p>'
    )


def matrix(values: Floats, rows: Sequence[str], title: str) -> str:
    """A heat map of rows by number, as experts by layer."""
    count, columns = values.shape
    whole = HeatMap(
        title=title,
        meaning="",
        rows=tuple(rows),
        first=np.arange(columns),
        last=np.arange(columns),
        values=values,
    )
    return heat_map(whole, Marks())


def positions(pairs: Sequence[tuple[int, Floats]]) -> str:
    """Loss by stretch of the sequence at the first and the last step."""
    lines = [values for _, values in pairs if np.isfinite(values).sum() > 1]
    if not lines:
        return ""
    height, right = 150, WIDE - _RIGHT
    low = min(float(np.nanmin(each)) for each in lines)
    high = max(float(np.nanmax(each)) for each in lines)
    room = 0.05 * (high - low) or 1.0
    low, high = low - room, high + room
    bottom = height - _BOTTOM

    def y(at: float) -> float:
        return _TOP + (high - at) / (high - low) * (bottom - _TOP)

    parts = [
        f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{right}"/>'
        f'<text class="dim" x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{number(tick)}</text>'
        for tick in ticks(low, high)
    ]
    for index, (_, values) in enumerate(pairs):
        # In pixels already, so they need no further scale.
        places = (_LEFT + (np.arange(len(values)) + 0.5) / len(values) * (right - _LEFT)).astype(np.int64)
        kind = "curve" if index == len(pairs) - 1 else "early"
        parts.append(f'<path class="{kind}" d="{path(places, values, float, y)}"/>')
    parts.append(f'<text class="dim" x="{_LEFT}" y="{height - 6}">start of the sequence</text>')
    parts.append(f'<text class="dim" x="{right}" y="{height - 6}" text-anchor="end">end</text>')
    return (
        f'<svg viewBox="0 0 {WIDE} {height}" role="img" aria-label="loss by position">{"".join(parts)}</svg>'
    )
