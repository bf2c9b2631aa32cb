"""Statistics as partial sums: every rank sends parts, parts of one node and of several add up to one value.

A part is a float64 vector. Parts of ranks, micro-batches and nodes combine element by element, in any order,
so ranks never have to communicate: whoever holds a share of the elements sends its share, and of ranks that
hold the same elements one sends (``watch`` decides which). A missing rank makes a value partial, not wrong
silently: ``parts`` of the store says how many came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Part = NDArray[np.float64]
"""Vector of one statistic's partial sums."""

Combine = Literal["sum", "max", "min"]

OUTLIERS = 16
"""Channels of ``outlier_channels``."""

POSITIONS = 64
"""Equal stretches of the sequence of ``loss_per_position``."""

HISTOGRAM_BINS = 64
"""Of ``histogram``: one per power of two of the absolute value, 2^-40 to 2^23; smaller and larger values fall
into the first and the last."""

HISTOGRAM_LOWEST = -40
"""Exponent of the first bin of ``histogram``."""


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """Definition of a statistic: how its parts combine, and what number they make."""

    name: str
    unit: str
    """``1`` without one."""

    combine: tuple[Combine, ...] | Combine
    """One operation for all elements, or one for each."""

    value: Callable[[Part], float]
    """Number of a complete part; NaN where nothing was counted."""

    meaning: str
    """One sentence for people, with the formula."""

    vector: Callable[[Part], NDArray[np.float64]] | None = None
    """Vector of a complete part where the statistic has one beside its number."""


def combined(name: str, parts: Sequence[Part]) -> Part:
    """``parts`` of the statistic ``name`` as one. Raises ``KeyError`` for an unknown name and ``ValueError``
    for none or for different lengths."""
    statistic = STATISTICS[name]
    if not parts:
        raise ValueError(f"found no part of {name}; expected at least one")
    if name == "outlier_channels":
        return _most_outlying(parts)
    stacked = np.stack([np.asarray(part, np.float64) for part in parts])
    if isinstance(statistic.combine, str):
        return _OPERATIONS[statistic.combine](stacked)
    if stacked.shape[1] != len(statistic.combine):
        raise ValueError(f"found {stacked.shape[1]} elements of {name}; expected {len(statistic.combine)}")
    columns = [_OPERATIONS[how](stacked[:, index]) for index, how in enumerate(statistic.combine)]
    return np.asarray(columns, np.float64)


def _most_outlying(parts: Sequence[Part]) -> Part:
    """Pairs (channel, largest absolute value) of the ``OUTLIERS`` largest; each channel once. Absent pairs
    have channel -1. Exact: a channel among the largest of all is among the largest of a rank that saw it."""
    best: dict[int, float] = {}
    for part in parts:
        for channel, value in np.asarray(part, np.float64)[: 2 * OUTLIERS].reshape(-1, 2):
            if channel >= 0:
                best[int(channel)] = max(best.get(int(channel), 0.0), float(value))
    ordered = sorted(best.items(), key=lambda pair: (-pair[1], pair[0]))[:OUTLIERS]
    sums = np.sum([np.asarray(part, np.float64)[2 * OUTLIERS :] for part in parts], axis=0)
    pairs = np.full((OUTLIERS, 2), (-1.0, 0.0))
    if ordered:
        pairs[: len(ordered)] = ordered
    return np.concatenate([pairs.ravel(), sums])


_OPERATIONS: Mapping[str, Callable[[Part], Part]] = {
    "sum": lambda stacked: np.asarray(stacked.sum(axis=0)),
    "max": lambda stacked: np.asarray(stacked.max(axis=0)),
    "min": lambda stacked: np.asarray(stacked.min(axis=0)),
}


def _ratio(above: float, below: float) -> float:
    return float(above / below) if below > 0 else float("nan")


def _root_ratio(part: Part) -> float:
    return float(np.sqrt(_ratio(part[0], part[1])))


def _mean(part: Part) -> float:
    return _ratio(part[0], part[1])


def _imbalance(part: Part) -> float:
    return _ratio(float(part.max(initial=0.0)) * len(part), float(part.sum()))


def _dead(part: Part) -> float:
    return float((part == 0).sum()) if part.sum() > 0 else float("nan")


def _overloaded(part: Part) -> float:
    total = float(part.sum())
    return float((part > 2 * total / len(part)).sum()) if total > 0 else float("nan")


def _by_position(part: Part) -> NDArray[np.float64]:
    sums, counts = part[:POSITIONS], part[POSITIONS:]
    means = np.full(POSITIONS, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _outlier_ratio(part: Part) -> float:
    """Largest absolute value over the root mean square of all elements."""
    square, count = part[2 * OUTLIERS :]
    return _ratio(float(part[1]), float(np.sqrt(_ratio(square, count))))


_ALL = (
    Statistic(
        name="activation_rms",
        unit="1",
        combine="sum",
        value=_root_ratio,
        meaning="Root mean square of a module's output; parts: sum of squares, elements.",
    ),
    Statistic(
        name="activation_max",
        unit="1",
        combine="max",
        value=lambda part: float(part[0]),
        meaning="Largest absolute value of a module's output.",
    ),
    Statistic(
        name="not_finite",
        unit="elements",
        combine="sum",
        value=lambda part: float(part.sum()),
        meaning="NaN and infinite elements of a module's output; parts: NaN, infinite.",
    ),
    Statistic(
        name="residual_growth",
        unit="1",
        combine="sum",
        value=_root_ratio,
        meaning="Root mean square of a layer's output over that of its input; parts: both sums of squares.",
    ),
    Statistic(
        name="gradient_norm",
        unit="1",
        combine="sum",
        value=lambda part: float(np.sqrt(part[0])),
        meaning="L2 norm of a layer's gradients, reduced over data-parallel ranks, before clipping.",
    ),
    Statistic(
        name="weight_norm",
        unit="1",
        combine="sum",
        value=lambda part: float(np.sqrt(part[0])),
        meaning="L2 norm of a layer's weights, after the update.",
    ),
    Statistic(
        name="update_ratio",
        unit="1",
        combine="sum",
        value=_root_ratio,
        meaning="L2 norm of a layer's update over that of its weights before it; parts: sums of squares.",
    ),
    Statistic(
        name="attention_logit_max",
        unit="1",
        combine="max",
        value=lambda part: float(part[0]),
        meaning="Largest attention logit (scaled, before the softmax) of the rows that were looked at.",
    ),
    Statistic(
        name="attention_entropy",
        unit="nats",
        combine="sum",
        value=_mean,
        meaning="Mean entropy of attention rows; parts: sum of entropies, rows.",
    ),
    Statistic(
        name="router_entropy",
        unit="nats",
        combine="sum",
        value=_mean,
        meaning="Mean entropy of the router's normalised scores; parts: sum of entropies, tokens.",
    ),
    Statistic(
        name="expert_load",
        unit="1",
        combine="sum",
        value=_imbalance,
        vector=lambda part: part,
        meaning="Tokens of each expert; as a number, the fullest expert's tokens over the mean.",
    ),
    Statistic(
        name="dead_experts",
        unit="experts",
        combine="sum",
        value=_dead,
        meaning="Experts without a token in the step; parts: tokens of each expert.",
    ),
    Statistic(
        name="overloaded_experts",
        unit="experts",
        combine="sum",
        value=_overloaded,
        meaning="Experts with more than twice the mean; parts: tokens of each expert.",
    ),
    Statistic(
        name="embedding_norm",
        unit="1",
        combine="sum",
        value=_root_ratio,
        meaning="Root mean square of the embedding's row norms; parts: sum of squares, rows.",
    ),
    Statistic(
        name="loss_per_position",
        unit="nats",
        combine="sum",
        value=lambda part: _ratio(float(part[:POSITIONS].sum()), float(part[POSITIONS:].sum())),
        vector=_by_position,
        meaning="Mean loss of the counted tokens by stretch of the sequence; parts: sums, then counts.",
    ),
    Statistic(
        name="validation_loss",
        unit="nats",
        combine="sum",
        value=_mean,
        meaning="Mean loss of the validation data's tokens after the step; parts: sum of losses, tokens.",
    ),
    Statistic(
        name="outlier_channels",
        unit="1",
        combine="max",
        value=_outlier_ratio,
        vector=lambda part: part[: 2 * OUTLIERS],
        meaning="Largest absolute value of a channel of a layer's output over the root mean square of all; "
        "parts: pairs (channel, largest), then sum of squares and elements.",
    ),
    Statistic(
        name="moments",
        unit="1",
        combine=("sum", "sum", "sum", "sum", "sum", "min", "max"),
        value=lambda part: _ratio(part[1], part[0]),
        vector=lambda part: part,
        meaning="On request: elements, sums of first to fourth powers, smallest, largest. Value: the mean.",
    ),
    Statistic(
        name="histogram",
        unit="elements",
        combine="sum",
        value=lambda part: float(part.sum()),
        vector=lambda part: part,
        meaning="On request; elements by power of two of the absolute value, as HISTOGRAM_BINS says.",
    ),
)

STATISTICS: Mapping[str, Statistic] = {each.name: each for each in _ALL}
"""By name."""

DERIVED = {"dead_experts": "expert_load", "overloaded_experts": "expert_load"}
"""Statistics that are made of another one's parts: ranks do not send them."""
