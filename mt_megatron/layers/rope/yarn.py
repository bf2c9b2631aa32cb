"""YaRN's two formulas: which rotary frequencies are interpolated, and how much attention is sharpened.

arXiv:2309.00071, sections 3.2 (NTK-by-parts) and 3.4 (attention scaling); DeepSeek's use of the second
with two coefficients is in its published ``modeling_deepseek.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def interpolated_share(
    dim: int,
    base: float,
    *,
    original_max_position_embeddings: int,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """fp32 [dim / 2]: 0 where a pair keeps its frequency, 1 where it is divided by the factor.

    Pair i turns ``original_max_position_embeddings / (2 pi base ** (2 i / dim))`` times in the length
    that the model was trained with. Pairs of more than ``beta_fast`` turns keep their frequency, those
    of fewer than ``beta_slow`` are interpolated, and a straight line joins the two; its ends are whole
    pairs, as in the published code.
    """

    def pair_of(turns: float) -> float:
        return dim * math.log(original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_of(beta_fast)), 0)
    last: float = min(math.ceil(pair_of(beta_slow)), dim - 1)
    if first == last:
        last += 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)


def magnitude(factor: float, coefficient: float) -> float:
    """``0.1 coefficient ln(factor) + 1``, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0
