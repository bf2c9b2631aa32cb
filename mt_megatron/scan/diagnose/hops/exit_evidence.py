"""Which slow place explains best by how much members leave later than expected: a weighing of likelihoods.

Expected is not exact: links of one kind differ a little, samples scatter, and both spread over the members in
ways of their own (what one hop takes longer makes many leave later). Deviations are measured in these
terms, so that a small one which nothing usual makes counts, and a large usual one does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mt_megatron.scan.analysis.robust import Floats

LEAST_GAIN = 16.0
"""By how much a place must explain the deviation better than no place (squared standard errors)."""

LEAST_EXPLAINED, NEARLY_ALL = 0.8, 0.975
"""Of the deviation's square; the second where what is left is more than scatter."""

SCATTER = 2.0
"""What is left per member by scatter alone, at most (squared standard errors)."""

BESIDE_SECOND = 0.55
"""What the best place leaves unexplained in units of what the second best does, at most."""

CLEARLY_BETTER = 0.5
"""The same of an unlikely place beside the likely ones."""

_COARSE, _FINE, _REFINED = 16, 7, 2

_REGULAR = 0.5
_FEWEST = 10

Place = tuple[int, ...]

Times = tuple[Floats, Floats]
"""Arrivals and exits, [samples, members] each, ns from the last arrival."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """What a group's members leave later than expected."""

    later: Floats
    """[members], ns."""

    covariance: Floats
    """[members, members]: of what is usual, and of the samples' scatter."""

    @property
    def size(self) -> float:
        """In squared standard errors: no place can explain more."""
        seen = self.whitened(self.later)
        return float(seen @ seen)

    def whitened(self, patterns: Floats) -> Floats:
        """``patterns`` [..., members] in standard errors that do not depend on each other."""
        lower = np.linalg.cholesky(self.covariance)
        flat = patterns.reshape(-1, patterns.shape[-1])
        found: Floats = np.linalg.solve(lower, flat.T).T.reshape(patterns.shape)
        return found


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A place that may be slow, in one way."""

    place: Place
    least: float
    """Slowness (ns) of which one speaks at least."""

    most: float
    pattern: Callable[[Floats], Floats]
    """Slownesses [sizes] -> what members leave later, [sizes, members]."""

    unlikely: int = 0
    """The more so the higher: it has to explain clearly better than those below."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The best place."""

    place: Place
    slowness: float
    """ns."""

    later: Floats
    """What it makes each member leave later, [members] ns."""

    gain: float
    rest: float
    """What stays unexplained, squared standard errors."""

    explained: float
    against_second: float

    def clear(self, least_gain: float = LEAST_GAIN) -> bool:
        """Whether it explains the deviation, and nothing else does nearly as well."""
        return (
            self.gain >= least_gain
            and self.explained >= (LEAST_EXPLAINED if self.rest <= SCATTER * len(self.later) else NEARLY_ALL)
            and self.against_second <= BESIDE_SECOND
        )


@dataclass(frozen=True)
class _Fit:
    rest: float
    slowness: float
    later: Floats
    candidate: Candidate
    nothing: float
    """What no place at all leaves unexplained."""


View = tuple[Deviation, Sequence[Candidate]]
"""What is seen and what may explain it, as one idea of the network has it."""


def best_place(views: Sequence[View]) -> Explanation | None:
    """The candidate of any of the ``views`` that leaves least unexplained; None without any."""
    fits: list[_Fit] = []
    for deviation, candidates in views:
        seen = deviation.whitened(deviation.later)
        fits += [_fitted(deviation, seen, each) for each in candidates]
    if not fits:
        return None
    # Below one standard error per member no two places differ.
    floor = float(len(fits[0].later))
    best: _Fit | None = None
    for level in sorted({each.candidate.unlikely for each in fits}):
        here = min((each for each in fits if each.candidate.unlikely == level), key=lambda each: each.rest)
        if best is None or here.rest + floor < CLEARLY_BETTER * (best.rest + floor):
            best = here
    assert best is not None
    chosen, nothing = best.candidate, best.nothing
    others = [
        each.rest
        for each in fits
        if each.candidate.place != chosen.place
        # One that is less likely but fits better leaves it open.
        and (each.candidate.unlikely <= chosen.unlikely or each.rest < best.rest)
    ]
    return Explanation(
        place=chosen.place,
        slowness=best.slowness,
        later=best.later,
        gain=nothing - best.rest,
        rest=best.rest,
        explained=1.0 - best.rest / max(nothing, 1e-12),
        against_second=(best.rest + floor) / (min([*others, nothing]) + floor),
    )


def _fitted(deviation: Deviation, seen: Floats, candidate: Candidate) -> _Fit:
    sizes = np.geomspace(candidate.least, max(candidate.most, 2.0 * candidate.least), _COARSE)
    fit: _Fit | None = None
    for _ in range(1 + _REFINED):
        made = candidate.pattern(sizes)
        rest = ((seen - deviation.whitened(made)) ** 2).sum(axis=-1)
        at = int(np.argmin(rest))
        if fit is None or rest[at] < fit.rest:
            fit = _Fit(float(rest[at]), float(sizes[at]), made[at], candidate, float(seen @ seen))
        low, high = sizes[max(at - 1, 0)], sizes[min(at + 1, len(sizes) - 1)]
        sizes = np.geomspace(low, high, _FINE)
    assert fit is not None
    return fit


def regular(times: Times) -> Times:
    """Those operations to which all came at about the same time, if they are enough: who waits long for the
    last has passed everything on before, and what is slow then shows differently."""
    arrival, exits = times
    chosen = np.ptp(arrival, axis=1) <= _REGULAR * float(np.median(exits.max(axis=1)))
    return (arrival[chosen], exits[chosen]) if chosen.sum() >= _FEWEST else times


def middle(values: Floats) -> Floats:
    """The mean of each member's ``values`` [samples, members], wild samples clipped: what members share in
    a sample they share in this, unlike in their medians."""
    found: Floats = _clipped(values).mean(axis=0)
    return found


def scatter(values: Floats) -> Floats:
    """Covariance of the ``middle`` of ``values`` [samples, members]."""
    clipped = _clipped(values)
    apart = clipped - clipped.mean(axis=0)
    # Clipped values scatter less than they are uncertain.
    found: Floats = 1.3 * (apart.T @ apart) / max(len(values), 1) ** 2
    return found


def _clipped(values: Floats) -> Floats:
    median = np.median(values, axis=0)
    spread = np.maximum(1.4826 * np.median(np.abs(values - median), axis=0), 1.0)
    found: Floats = np.clip(values, median - 2.5 * spread, median + 2.5 * spread)
    return found
