"""What one clock shows when another shows a given time: an offset that is piecewise linear in time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class OffsetLine:
    """Maps times of one clock to times of another: ``time + base + delta(time)``.

    Clocks of different machines can be years apart, so the large part of the offset is an integer and only
    the rest is a float: a nanosecond stays one.
    """

    knots: Times
    """Times of the first clock in ns, ascending, at least one."""

    base: int
    """ns that are added at every time."""

    delta: Floats
    """ns beyond ``base`` at each knot; in between it is interpolated."""

    slope_before: float = 0.0
    """ns per ns before the first knot."""

    slope_after: float = 0.0
    """ns per ns after the last knot."""

    def __call__(self, times: Times) -> Times:
        """``times`` (any shape, int64 ns) of the first clock as times of the second."""
        if self.is_identity:
            return times
        return np.asarray(times + (self.base + np.rint(self._rest(times)).astype(np.int64)))

    @property
    def is_identity(self) -> bool:
        """Whether both clocks are the same."""
        return self.base == 0 and not self.delta.any() and self.slope_before == 0.0 == self.slope_after

    def _rest(self, times: Times) -> Floats:
        start = self.knots[0]
        x = (times - start).astype(np.float64)
        knots = (self.knots - start).astype(np.float64)
        rest = np.interp(x, knots, self.delta)
        rest += np.minimum(x, 0.0) * self.slope_before
        rest += np.maximum(x - knots[-1], 0.0) * self.slope_after
        return np.asarray(rest, dtype=np.float64)

    def inverse(self) -> OffsetLine:
        """The way back, exact at the knots to a nanosecond."""
        return OffsetLine(
            knots=self.knots + (self.base + np.rint(self.delta).astype(np.int64)),
            base=-self.base,
            delta=-self.delta,
            slope_before=-self.slope_before / (1 + self.slope_before),
            slope_after=-self.slope_after / (1 + self.slope_after),
        )

    def then(self, other: OffsetLine) -> OffsetLine:
        """The first clock's times on the clock that ``other`` leads to."""
        if other.is_identity:
            return self
        if self.is_identity:
            return other
        knots = np.unique(np.concatenate([self.knots, self.inverse()(other.knots)]))
        base = self.base + other.base
        delta = self._rest(knots) + other._rest(self(knots))
        return OffsetLine(
            knots=knots,
            base=base,
            delta=delta,
            slope_before=(1 + self.slope_before) * (1 + other.slope_before) - 1,
            slope_after=(1 + self.slope_after) * (1 + other.slope_after) - 1,
        )

    def plus(self, knots: Times, more: Floats) -> OffsetLine:
        """Later by ``more`` ns, given at times ``knots`` of the *second* clock and constant outside them."""
        if not more.any():
            return self
        here = self.inverse()(knots)
        together = np.unique(np.concatenate([self.knots, here]))
        start = here[0]
        added = np.interp((together - start).astype(np.float64), (here - start).astype(np.float64), more)
        return OffsetLine(
            knots=together,
            base=self.base,
            delta=self._rest(together) + added,
            slope_before=self.slope_before,
            slope_after=self.slope_after,
        )


def same_clock() -> OffsetLine:
    """The line between a clock and itself."""
    return OffsetLine(knots=np.zeros(1, dtype=np.int64), base=0, delta=np.zeros(1))


def robust_slope(x: Floats, y: Floats, *, most: int = 120) -> float:
    """Median of the slopes between points that lie at least a third of the whole stretch apart (Theil and
    Sen's estimator without the short pairs, whose slopes are noise); 0 for a single point."""
    if len(x) < 2:
        return 0.0
    if len(x) > most:
        chosen = np.linspace(0, len(x) - 1, most).astype(np.int64)
        x, y = x[chosen], y[chosen]
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] - x[first]
    far = np.abs(apart) >= max((x.max() - x.min()) / 3, 1.0)
    if not far.any():
        return 0.0
    return float(np.median((y[second] - y[first])[far] / apart[far]))
