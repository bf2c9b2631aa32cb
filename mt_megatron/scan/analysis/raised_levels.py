"""Stretches of steps in which a series lies clearly above what is normal, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
from numpy.typing import NDArray

from .change_points import SHORTEST, stretches
from .robust import Floats, certainty, noise, spread

FALSE_ALARMS = 1e-4
"""Expected number of false alarms of all tests of one analysis, were the clipped noise normal."""


BEYOND_WANDER = 3.0
"""A level stands out from slow changes that come and go, such as those of a busy machine, when it is so many
of their standard deviations."""

ANOTHER = 2.0
"""A stretch so many times as high as its neighbour is another matter: a fault that falls into a busy time."""

BLOCK, FEWEST_BLOCKS = 4, 5
NOISE_OF_MEDIANS = 0.75
"""The standard deviation of a block's median in units of one step's, with room for chance."""


@dataclass(frozen=True, kw_only=True)
class Raised:
    """One stretch: positions ``start`` to ``stop - 1``."""

    start: int
    stop: int
    level: float
    """Median of the series there."""

    certainty: float
    """Standard errors above what is tolerated."""

    needed: float
    """Standard errors that were asked for."""

    @property
    def confidence(self) -> float:
        """0.6 just over the bar, towards 0.98 far above it."""
        return 0.98 - 0.38 * exp(-max(self.certainty - self.needed, 0.0) / 3.0)

    def steps(self, size: int) -> NDArray[np.bool_]:
        """The stretch as a mask over ``size`` steps."""
        chosen = np.zeros(size, dtype=bool)
        chosen[self.start : self.stop] = True
        return chosen


def beyond_noise(raised: Raised) -> str:
    """``19 times the noise; at least 5.0 is needed``: standard errors in words for readers of a report."""
    return f"{raised.certainty:.1f} times the noise; at least {raised.needed:.1f} is needed"


def bar(tests: int) -> float:
    """Standard errors that keep the false alarms of ``tests`` independent tests below ``FALSE_ALARMS``."""
    share = FALSE_ALARMS / max(tests, 1)
    # The upper quantile of the normal distribution, by its tail's leading terms.
    square = -2.0 * log(share)
    return sqrt(square - log(square) - log(2.0 * np.pi))


def raised_levels(
    series: Floats, *, least: float, tolerated: float, floor: float, tests: int, shortest: int = SHORTEST
) -> list[Raised]:
    """The stretches of ``series`` [steps] whose level is at least ``least`` and surely above ``tolerated``.

    ``floor``: the least standard deviation of one step that is believed. ``tests``: how many steps of
    how many series are looked at in all. Neighbouring stretches that are raised alike become one.
    """
    deviation = max(noise(series), floor)
    needed = bar(tests)
    cut = stretches(series, floor=floor, shortest=shortest)
    above: list[tuple[int, int]] = []
    level = 0.0
    for each in cut:
        if each.level < least:
            continue
        if (
            above
            and above[-1][1] == each.start
            and each.level < ANOTHER * level
            and level < ANOTHER * each.level
        ):
            above[-1] = (above[-1][0], each.stop)
        else:
            above.append((each.start, each.stop))
        level = each.level
    found = []
    for start, stop in above:
        inside = series[start:stop]
        inside = inside[~np.isnan(inside)]
        if len(inside) < shortest:
            continue
        # Slow drifts hide from differences of neighbours: the stretch's own spread counts too.
        own = max(deviation, 0.7 * spread(inside))
        if float(np.median(inside)) < BEYOND_WANDER * wander(series, start, stop):
            continue
        sure = certainty(inside - tolerated, own)
        if sure >= needed:
            found.append(
                Raised(start=start, stop=stop, level=float(np.median(inside)), certainty=sure, needed=needed)
            )
    return found


def wander(series: Floats, start: int, stop: int) -> float:
    """By how much ``series`` [steps] moves slowly outside ``start`` to ``stop - 1``: the spread of medians of
    a few neighbouring steps, beyond what independent noise makes of it. 0 where little is known."""
    medians, outside = [], np.concatenate((series[:start], series[stop:]))
    for part in (series[:start], series[stop:]):
        part = part[~np.isnan(part)]
        medians += [float(np.median(part[at : at + BLOCK])) for at in range(0, len(part) - BLOCK + 1, BLOCK)]
    if len(medians) < FEWEST_BLOCKS:
        return 0.0
    by_noise = NOISE_OF_MEDIANS * noise(outside)
    return sqrt(max(spread(medians) ** 2 - by_noise**2, 0.0))


def by_chance(raised: Raised, usual: Floats) -> float:
    """About how often ``usual`` values [any shape] would make such a stretch by chance: half of its steps
    above half of its level."""
    values = usual[np.isfinite(usual)]
    share = (float(np.sum(values > 0.5 * raised.level)) + 0.5) / max(len(values), 1)
    return max(len(values), 1) * share ** ((raised.stop - raised.start + 1) // 2)


def merged_spikes(
    fraction: Floats, others: Floats, *, least: float, mean: float, fewest: int, within: int = 40
) -> tuple[int, int, float] | None:
    """Repeated single steps above ``least``: at least ``fewest`` of them within ``within`` steps, and more
    than the ``others`` [series, steps] have and chance gives.

    Returns start, stop and mean of ``fraction`` from the first to the last of the densest row of
    spikes if the mean reaches ``mean``; else None.
    """
    values = np.nan_to_num(fraction)
    at = np.flatnonzero(values >= least)
    usual = (np.sum(np.nan_to_num(others) >= least) + 0.5) / max(others.size, len(values))
    while fewest <= within and _poisson_tail(fewest, usual * within) > 1e-3 * within / max(
        others.size + len(values), within
    ):
        fewest += 1
    if len(at) < fewest:
        return None
    close = at[fewest - 1 :] - at[: len(at) - fewest + 1] < within
    if not close.any():
        return None
    member = np.zeros(len(at), dtype=bool)
    for index in np.flatnonzero(close):
        member[index : index + fewest] = True
    first, last = int(at[member][0]), int(at[member][-1])
    average = float(values[first : last + 1].mean())
    return (first, last + 1, average) if average >= mean else None


def _poisson_tail(count: int, expected: float) -> float:
    """The probability of ``count`` or more where ``expected`` are expected."""
    term, below = exp(-expected), 0.0
    for number in range(count):
        below += term
        term *= expected / (number + 1)
    # Far out the difference to one is lost in rounding: the first term bounds it.
    return max(1.0 - below, term)
