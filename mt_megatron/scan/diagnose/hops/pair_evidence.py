"""Which two members of an all-to-all exchange slowly: these leave later than expected, and nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations

import numpy as np

from mt_megatron.scan.analysis.robust import Floats

from .exit_evidence import (
    Candidate,
    Deviation,
    Explanation,
    Place,
    Times,
    best_place,
    middle,
    regular,
    scatter,
)

USUAL = 0.02
"""By how much one member's exits differ usually from those of its like elsewhere, of the whole operation."""

USUAL_OVER_TIME = 0.0075
"""The same from its own at other times."""

USUAL_TOGETHER = 0.06
MISFIT = 0.05
_LEAST = 0.12
"""Of the whole operation: what a slow way adds at least."""

_MOST_MEMBERS = 6
_UNEQUAL = (1.0, 0.7, 0.45)
"""What waits for the slow message need not wait for all of it: how much later one is than the other."""


def slow_pair(
    seen: Times, sound: Sequence[Times], *, same_group: bool, clock_error: float, least_gain: float
) -> Explanation | None:
    """The two members (their positions) that explain ``seen`` best beside ``sound`` operations: of the
    ``same_group`` at other times, or of groups that lie alike. None where there is less than ``least_gain``
    to explain."""
    exits = regular(seen)[1]
    usual = [regular(each)[1] for each in sound]
    middles = np.stack([middle(each) for each in usual])
    later = middle(exits) - np.median(middles, axis=0)
    members = len(later)
    if members < 3:
        return None
    whole = float(np.median(exits.max(axis=1)))
    covariance = scatter(exits) + sum(scatter(each) for each in usual) / len(usual) ** 2
    covariance = covariance + (USUAL_TOGETHER * whole) ** 2
    own = (USUAL_OVER_TIME if same_group else USUAL) * whole
    floor = max(own, 0.5 * clock_error) ** 2 + (MISFIT * float(np.abs(later).max())) ** 2
    deviation = Deviation(later=later, covariance=covariance + floor * np.eye(members))
    if deviation.size < least_gain:
        return None
    return best_place([(deviation, _candidates(later, whole))])


def _candidates(later: Floats, whole: float) -> list[Candidate]:
    members = len(later)
    latest = sorted(np.argsort(-later)[:_MOST_MEMBERS].tolist())
    shapes: list[tuple[Place, Floats]] = [(tuple(range(members)), np.ones(members))]
    for one in latest:
        shapes.append(((one,), _at(members, {one: 1.0})))
    for one, other in combinations(latest, 2):
        for part in _UNEQUAL:
            shapes.append(((one, other), _at(members, {one: 1.0, other: part})))
            shapes.append(((one, other), _at(members, {one: part, other: 1.0})))
    most = max(1.5 * float(np.abs(later).max()), whole)
    return [
        Candidate(
            place=place,
            least=_LEAST * whole,
            most=most,
            pattern=partial(_scaled, shape),
        )
        for place, shape in shapes
    ]


def _scaled(shape: Floats, sizes: Floats) -> Floats:
    found: Floats = sizes[:, None] * shape
    return found


def _at(members: int, values: dict[int, float]) -> Floats:
    found = np.zeros(members)
    for place, value in values.items():
        found[place] = value
    return found
