"""Results of single kernels that the host puts together: of tensors on an accelerator.

A norm or a maximum is one kernel. Sums of squares, counts and ratios are made of them by the host, in
float64, in the thread that encodes. A ``Family`` says how, for the calls of all modules at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mt_megatron.scope.watch.sums import wide

Values = NDArray[np.float64]

Combine = Callable[[Values, Values], Values]
"""Gets the scalars [calls, n] and the known numbers [calls, m] of all calls; returns what each call adds to
the parts of the family's statistics, one after the other, [calls, sum of their lengths]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Statistics that are made of the same scalars of a call."""

    statistics: tuple[tuple[str, int, Literal["sum", "max"]], ...]
    """Name, length of the part, and how calls combine."""

    combine: Combine


def norm(values: Tensor) -> Tensor:
    """L2 norm [] in float32 at least. One kernel reduces as a tree, whose float32 sums are good to 1e-6."""
    found: Tensor = torch.linalg.vector_norm(values, dtype=wide(values))
    return found


def largest(values: Tensor) -> Tensor:
    """Largest absolute value [] in float32 at least; NaN where an element is."""
    found: Tensor = torch.linalg.vector_norm(values, ord=torch.inf, dtype=wide(values))
    return found


def largest_of_channels(values: Tensor) -> Tensor:
    """Largest absolute value of each channel [channels] of [..., channels], in float32 at least; NaN where an
    element is."""
    rows = values.reshape(-1, values.size(-1))
    found: Tensor = torch.linalg.vector_norm(rows, ord=torch.inf, dim=0, dtype=wide(values))
    return found


def _squares(rows: Values, known: Values) -> Values:
    """Squares of norms, then what is known."""
    return np.concatenate((rows * rows, known), axis=1)


def _output(rows: Values, known: Values) -> Values:
    """Of norms and largest absolute values. Elements that are not finite are some at least: one of an output
    that has any. They are counted from the next sampled step on (``Parts.counts``)."""
    norms, largest = rows.T
    parts = (norms * norms, known[:, 0], largest, np.isnan(largest), np.isinf(largest))
    return np.stack(parts, axis=1)


def _counted_output(rows: Values, known: Values) -> Values:
    return _output(rows, known)[:, :3]


def _as_they_are(rows: Values, known: Values) -> Values:
    return np.concatenate((rows, known), axis=1)


def _update(rows: Values, known: Values) -> Values:
    """Updates that subtracted a multiple of a direction from weights, beside their decay.

    Scalars: the norm of the weights after the update (0 for all but one piece of a parameter), the norm of
    the direction, its product with the weights after the update and, where the host does not know it, the
    multiple. Known: the decay, and the multiple (or 1).
    """
    multiple: Any = known[:, 1] * (rows[:, 3] if rows.shape[1] > 3 else 1.0)
    square, product = (multiple * rows[:, 1]) ** 2, multiple * rows[:, 2]
    # after = kept * before - subtracted, so that two sums over the elements give all others.
    decay = known[:, 0]
    kept = 1.0 - decay
    before = (rows[:, 0] ** 2 + 2.0 * product + square) / kept**2
    updated = square + 2.0 * decay * (product + square) / kept + decay**2 * before
    return np.stack((updated, before), axis=1)


def _no_update(rows: Values, known: Values) -> Values:
    return np.concatenate((np.zeros_like(rows), rows * rows), axis=1)


_RMS: tuple[str, int, Literal["sum"]] = ("activation_rms", 2, "sum")
_MAX: tuple[str, int, Literal["max"]] = ("activation_max", 1, "max")
_RATIO: tuple[str, int, Literal["sum"]] = ("update_ratio", 2, "sum")

OUTPUT = Family(statistics=(_RMS, _MAX, ("not_finite", 2, "sum")), combine=_output)
"""Scalars: the norm and the largest absolute value of an output. Known: its elements."""

COUNTED_OUTPUT = Family(statistics=(_RMS, _MAX), combine=_counted_output)
"""The same of an output whose elements that are not finite are counted by themselves."""

LAYER = Family(statistics=(_RMS,), combine=_squares)
"""Scalar: the norm of a layer's output. Known: its elements. ``Parts.channels`` has the rest."""

GROWTH = Family(statistics=(("residual_growth", 2, "sum"),), combine=_squares)
"""Scalars: the norms of a layer's output and input."""

ATTENTION = Family(
    statistics=(("attention_logit_max", 1, "max"), ("attention_entropy", 2, "sum")), combine=_as_they_are
)
"""Scalars: the largest logit of rows and the sum of their entropies. Known: the rows."""

ROUTER = Family(statistics=(("router_entropy", 2, "sum"),), combine=_as_they_are)
"""Scalar: the sum of the tokens' entropies. Known: the tokens."""

GRADIENT = Family(statistics=(("gradient_norm", 1, "sum"),), combine=_squares)
WEIGHT = Family(statistics=(("weight_norm", 1, "sum"),), combine=_squares)
"""Scalar: the norm."""

EMBEDDING = Family(statistics=(("embedding_norm", 2, "sum"),), combine=_squares)
"""Scalar: the norm of the embedding. Known: its rows."""

UPDATE = Family(statistics=(_RATIO,), combine=_update)
"""Scalars: the norm of the weights after the update, the norm of a direction, its product with the weights.
Known: the decay and what the direction was multiplied with."""

UPDATE_BY_TENSOR = Family(statistics=(_RATIO,), combine=_update)
"""The same, with a further scalar that the direction was multiplied with."""

UPDATE_BY_COPY = Family(statistics=(_RATIO,), combine=_squares)
"""Scalars: the norm of the difference, and that of the weights before it."""

NO_UPDATE = Family(statistics=(_RATIO,), combine=_no_update)
"""Scalar: the norm of weights that were left as they are."""
