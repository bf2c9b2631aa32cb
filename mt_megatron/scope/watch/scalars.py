"""Results of single kernels that the host puts together: of tensors on an accelerator.

A norm or a maximum is one kernel. Sums of squares, counts and ratios are made of them by the host, in
float64, in the thread that encodes. Functions from ``squares`` on have the signature ``Combine``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mt_megatron.scope.watch.sums import wide

Values = NDArray[np.float64]

Combine = Callable[[Values, Values], Values]
"""Gets the scalars [calls, n] and the known numbers [calls, m] of an entry; returns its part, a vector."""


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


def squares(rows: Values, known: Values) -> Values:
    """Sums of squares of norms, then sums of what is known."""
    return np.concatenate(((rows * rows).sum(axis=0), known.sum(axis=0)))


def totals(rows: Values, known: Values) -> Values:
    """Sums, then sums of what is known."""
    return np.concatenate((rows.sum(axis=0), known.sum(axis=0)))


def maxima(rows: Values, known: Values) -> Values:
    """The largest; NaN stays NaN."""
    return np.asarray(rows.max(axis=0))


def at_least(rows: Values, known: Values) -> Values:
    """Elements that are NaN and that are infinite, at least, of largest absolute values: one of a tensor that
    has any. They are counted from the next sampled step on (``Parts.counts``)."""
    return np.asarray([np.isnan(rows).sum(), np.isinf(rows).sum()], np.float64)


def no_update(rows: Values, known: Values) -> Values:
    """``update_ratio`` of weights with these norms that were not updated."""
    return np.asarray([0.0, (rows * rows).sum()])


def update(rows: Values, known: Values) -> Values:
    """``update_ratio`` of weights that lost a multiple of a direction, beside their decay.

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
    return np.asarray([updated.sum(), before.sum()])
