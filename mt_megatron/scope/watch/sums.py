"""Partial sums of tensors, on their device; nothing waits for it.

Functions return short float vectors in the order of ``scope.format.statistics``; what adds up over
micro-batches is added in ``parts``. Reductions run in float32 at least, like torch's norms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mt_megatron.backends.dtypes import wide_float
from mt_megatron.scope.format.statistics import HISTOGRAM_BINS, HISTOGRAM_LOWEST, OUTLIERS, POSITIONS

_BLOCK = 4096
"""Elements that are summed up in float32: a CPU's norm of 3e7 normal numbers was off by 2e-3 [measured], of
as many in blocks of this size by 5e-9."""


def square_sum(values: Tensor) -> Tensor:
    """Sum of squares, [] in float64 where the device has it, else float32."""
    flat = values.reshape(-1)
    blocks = flat.numel() // _BLOCK
    norms = torch.linalg.vector_norm(flat[: blocks * _BLOCK].view(blocks, _BLOCK), dim=1, dtype=wide(values))
    rest = torch.linalg.vector_norm(flat[blocks * _BLOCK :], dtype=wide(values)).reshape(1)
    norms = torch.cat((norms, rest)).to(wide_float(values.device))
    return torch.dot(norms, norms)


def wide(values: Tensor) -> torch.dtype:
    """The dtype for sums of ``values``: float32 at least."""
    return torch.float64 if values.dtype is torch.float64 else torch.float32


def not_finite(values: Tensor, squares: Tensor | float) -> Tensor:
    """int64 [2]: NaN and infinite elements of ``values``, whose sum of squares is ``squares``."""
    if values.device.type == "cpu" and math.isfinite(squares):
        # Counting takes ten times as long as the sum; on another device a look at it would wait.
        return torch.zeros(2, dtype=torch.int64)
    infinite = torch.count_nonzero(values == float("inf")) + torch.count_nonzero(values == -float("inf"))
    return torch.stack((torch.count_nonzero(values != values), infinite))


def channel_maxima(values: Tensor) -> Tensor:
    """Largest absolute value of each channel, float32 [channels], of [..., channels]; infinite where an
    element is not a number, so that a channel with one stands out."""
    rows = values.reshape(-1, values.size(-1))
    largest = torch.maximum(rows.amax(dim=0), rows.amin(dim=0).neg())
    found: Tensor = largest.to(wide(values)).nan_to_num_(nan=float("inf"), posinf=float("inf"))
    return found


def outliers_of(maxima: Tensor) -> Tensor:
    """The pairs of ``outlier_channels``, float [..., 2 * OUTLIERS], of ``channel_maxima`` [..., channels]."""
    count = min(OUTLIERS, maxima.size(-1))
    values, channels = maxima.topk(count)
    pairs = torch.stack((channels.to(maxima.dtype), values), dim=-1)
    if count < OUTLIERS:
        absent = maxima.new_tensor((-1.0, 0.0)).expand(*maxima.shape[:-1], OUTLIERS - count, 2)
        pairs = torch.cat((pairs, absent), dim=-2)
    return pairs.flatten(-2)


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of first to fourth powers, float [4], and the smallest and the largest element, float [2]."""
    flat = values.reshape(-1).to(wide(values))
    squares = flat * flat
    powers = torch.stack((flat.sum(), squares.sum(), (squares * flat).sum(), (squares * squares).sum()))
    return powers, torch.stack((flat.amin(), flat.amax()))


def histogram(values: Tensor) -> Tensor:
    """int64 [HISTOGRAM_BINS]: elements by power of two of the absolute value; NaN is left out."""
    flat = values.reshape(-1).float().abs()
    # frexp: value = mantissa * 2^exponent with a mantissa of 0.5 to 1, so 2^(exponent - 1) is below it.
    _, exponent = torch.frexp(flat)
    bins = (exponent.long() - 1 - HISTOGRAM_LOWEST).clamp_(0, HISTOGRAM_BINS - 1)
    bins = torch.where(flat == 0, 0, bins)
    bins = torch.where(torch.isinf(flat), HISTOGRAM_BINS - 1, bins)
    bins = torch.where(torch.isnan(flat), HISTOGRAM_BINS, bins)
    counts = torch.zeros(HISTOGRAM_BINS + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, bins, torch.ones_like(bins))
    return counts[:-1]


def entropy_sum(probabilities: Tensor) -> Tensor:
    """Sum over the rows of [..., n] of their entropies, in nats."""
    total: Tensor = torch.special.entr(probabilities).sum()
    return total


def loss_by_position(losses: Tensor, mask: Tensor, positions: Tensor, length: int) -> Tensor:
    """Sums, then counts, float [2 * POSITIONS], of ``losses`` [b, n] that ``mask`` [b, n] counts.

    ``positions`` int64 [n] are the tokens' places in a sequence of ``length``.
    """
    weights = mask.to(losses.dtype)
    stretch = positions * POSITIONS // length
    both = torch.stack(((losses * weights).sum(dim=0), weights.sum(dim=0)))
    found = torch.zeros(2, POSITIONS, dtype=losses.dtype, device=losses.device)
    return found.index_add_(1, stretch, both).reshape(-1)
