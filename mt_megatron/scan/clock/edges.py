"""The offset between two clocks from pings: the fastest exchanges of each stretch of time, joined by lines.

An exchange that took long was held up somewhere, mostly on one of its two ways, and then its middle lies.
Only the fastest are listened to (D. Mills, NTP's clock filter); all of them are bounds: the answer cannot
have been sent before the question arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .offset_lines import Floats, OffsetLine, Times, robust_slope

_BURST_GAP = 500_000_000
_LONGEST_WINDOW = 5_000_000_000
_LONGEST_MERGED = 120_000_000_000
_WANTED_PER_WINDOW = 16
_FASTEST = 20
_SLOW_WINDOW = 3.0

_DRIFT = 100e-6
"""Clocks of computers differ by less; what looks like more over a short time is noise."""


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """Pings between clock A and clock B, in whichever direction they went; one entry each, by time."""

    at: Times
    """Middle of the exchange, ns of clock A."""

    low: Times
    """B - A was at least this, ns."""

    high: Times
    """B - A was at most this, ns."""

    @property
    def round_trip(self) -> Times:
        """ns on the way, both ways together."""
        return self.high - self.low


def exchanges(asked: Sequence[np.ndarray], answered: Sequence[np.ndarray]) -> Exchanges:
    """From ``PING`` arrays: those that ranks on clock A sent to clock B, and those B sent to A.

    Exchanges without a positive round trip (a clock that stepped, a torn record) are left out.
    """
    at, low, high = [], [], []
    for pings in asked:
        at.append(pings["sent"] + (pings["returned"] - pings["sent"]) // 2)
        low.append(pings["answered"] - pings["returned"])
        high.append(pings["received"] - pings["sent"])
    for pings in answered:
        at.append(pings["received"] + (pings["answered"] - pings["received"]) // 2)
        low.append(pings["sent"] - pings["received"])
        high.append(pings["returned"] - pings["answered"])
    empty = np.zeros(0, dtype=np.int64)
    times, lowest, highest = (np.concatenate([empty, *each]) for each in (at, low, high))
    order = np.argsort(times, kind="stable")
    order = order[(highest - lowest)[order] > 0]
    return Exchanges(at=times[order], low=lowest[order], high=highest[order])


@dataclass(frozen=True, kw_only=True)
class EdgeFit:
    """The offset between two clocks, and how good it is. Figures in ns."""

    line: OffsetLine
    """From clock A to clock B."""

    pings: int
    windows: int
    drift_ppm: float
    """How much faster clock B runs."""

    round_trip_min: float
    round_trip_median: float
    residual_median: float
    """Of the fast exchanges' distances from the line."""

    residual_p99: float
    left_out_p99: float
    """How far each stretch's offset is from the line between its neighbours: what the line would have said
    without it, an upper estimate of the error in between. NaN with fewer than three stretches."""

    @property
    def uncertainty(self) -> float:
        """Half the fastest round trip: no asymmetry of the way can hide a larger error at the knots."""
        return self.round_trip_min / 2


def fit_edge(found: Exchanges) -> EdgeFit | None:
    """Fit the line through ``found``; None without any exchange."""
    if len(found.at) == 0:
        return None
    start, base = int(found.at[0]), int(np.median(found.low))
    x = (found.at - start).astype(np.float64)
    low, high = (found.low - base).astype(np.float64), (found.high - base).astype(np.float64)
    middle, trip = (low + high) / 2, high - low
    slope = _first_slope(x, middle, trip)
    # Within a stretch the drift would look like noise: it is taken out, and put back at the end.
    drift = slope * x
    windows = [
        _window(part, x, middle - drift, low - drift, high - drift, trip) for part in _windows(found.at)
    ]
    kept = _without_slow(windows)
    at = np.array([each.at for each in kept])
    value = np.array([each.value for each in kept]) + slope * at
    left_out = _left_out(at, value)
    line = OffsetLine(
        knots=start + np.rint(at).astype(np.int64),
        base=base,
        delta=value,
        slope_before=_end_slope(kept[:8], value[:8], slope),
        slope_after=_end_slope(kept[-8:], value[-8:], slope),
    )
    fast = np.concatenate([each.fastest for each in kept])
    distance = np.abs(middle[fast] + base - (line(found.at[fast]) - found.at[fast]))
    return EdgeFit(
        line=line,
        pings=len(found.at),
        windows=len(kept),
        drift_ppm=slope * 1e6,
        round_trip_min=float(trip.min()),
        round_trip_median=float(np.median(trip)),
        residual_median=float(np.median(distance)),
        residual_p99=float(np.quantile(distance, 0.99)),
        left_out_p99=float(np.quantile(np.abs(left_out), 0.99)) if len(left_out) else float("nan"),
    )


@dataclass(frozen=True, kw_only=True)
class _Window:
    at: float
    value: float
    low: float
    high: float
    trip: float
    fastest: Times


def _first_slope(x: Floats, middle: Floats, trip: Floats) -> float:
    if len(x) < 2 or x[-1] == x[0]:
        return 0.0
    # The fastest of each tenth of the time, so that quiet moments do not all come from one end.
    bins = np.minimum((x - x[0]) / (x[-1] - x[0]) * 10, 9).astype(np.int64)
    chosen: list[np.ndarray] = []
    for number in np.unique(bins):
        members = np.flatnonzero(bins == number)
        chosen.append(members[np.argsort(trip[members])[:12]])
    best = np.sort(np.concatenate(chosen))
    return robust_slope(x[best], middle[best]) if _tells_drift(x[best], float(np.median(trip[best]))) else 0.0


def _windows(at: Times) -> list[Times]:
    """Indices of ``at`` by stretch: a burst each, long ones cut up, small ones put together."""
    starts = np.flatnonzero(np.diff(at) > _BURST_GAP) + 1
    pieces: list[Times] = []
    for burst in np.split(np.arange(len(at)), starts):
        length = at[burst[-1]] - at[burst[0]]
        count = min(int(length // _LONGEST_WINDOW) + 1, max(len(burst) // _WANTED_PER_WINDOW, 1))
        pieces.extend(np.array_split(burst, count))
    merged: list[Times] = []
    for piece in pieces:
        small = bool(merged) and min(len(merged[-1]), len(piece)) < _WANTED_PER_WINDOW // 2
        if small and at[piece[-1]] - at[merged[-1][0]] <= _LONGEST_MERGED:
            merged[-1] = np.concatenate([merged[-1], piece])
        else:
            merged.append(piece)
    return merged


def _window(part: Times, x: Floats, middle: Floats, low: Floats, high: Floats, trip: Floats) -> _Window:
    count = min(max(len(part) // 10, 4), _FASTEST)
    fastest = part[np.argsort(trip[part], kind="stable")[:count]]
    value = float(np.median(middle[fastest]))
    lowest, highest = float(low[part].max()), float(high[part].min())
    if lowest <= highest:
        value = min(max(value, lowest), highest)
    return _Window(
        at=float(np.median(x[fastest])),
        value=value,
        low=lowest,
        high=highest,
        trip=float(trip[fastest].min()),
        fastest=fastest,
    )


def _without_slow(windows: list[_Window]) -> list[_Window]:
    """Leave out stretches with slow exchanges only, where the others' line fits within their bounds."""
    usual = float(np.median([each.trip for each in windows]))
    fast = [each for each in windows if each.trip <= _SLOW_WINDOW * usual]
    if len(fast) < 2 or len(fast) == len(windows):
        return windows
    at, value = np.array([each.at for each in fast]), np.array([each.value for each in fast])
    kept = []
    for each in windows:
        expected = float(np.interp(each.at, at, value))
        tells_more = not each.low <= expected <= each.high
        if each.trip <= _SLOW_WINDOW * usual or tells_more:
            kept.append(each)
    return kept


def _left_out(at: Floats, value: Floats) -> Floats:
    if len(at) < 3:
        return np.zeros(0)
    share = (at[1:-1] - at[:-2]) / np.maximum(at[2:] - at[:-2], 1.0)
    between = value[:-2] + share * (value[2:] - value[:-2])
    return np.asarray(value[1:-1] - between, dtype=np.float64)


def _end_slope(windows: Sequence[_Window], value: Floats, otherwise: float) -> float:
    at = np.array([each.at for each in windows])
    noise = float(np.median([each.trip for each in windows]))
    return robust_slope(at, value) if len(at) >= 3 and _tells_drift(at, noise) else otherwise


def _tells_drift(x: Floats, noise: float) -> bool:
    """Whether a stretch is long enough for a drift to stand out from what exchanges of round trip ``noise``
    can hide."""
    return bool(noise / 2 <= _DRIFT * (x[-1] - x[0]))
