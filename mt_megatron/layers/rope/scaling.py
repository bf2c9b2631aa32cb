"""Rotary frequencies of stretched positions: linear, Llama 3.1's and YaRN.

The fields are those of the TransformerConfig (``transformer_fields``), so that a plain rotary
embedding, multi-latent attention and a memory plan read the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.errors import ConfigError

ROPE_TYPES = ("rope", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary positions are stretched. Raises ConfigError for what no formula takes."""

    rope_type: str = "rope"
    """``rope`` (not at all), ``linear`` (arXiv:2306.15595), ``llama3`` (Llama 3.1's model code) or
    ``yarn`` (arXiv:2309.00071)."""

    rotary_scaling_factor: float = 1.0
    """How many times longer a sequence may become; 1 changes nothing."""

    original_max_position_embeddings: int = 4096
    """Tokens of the sequences before stretching. Llama 3.1 has 8192, DeepSeek 4096."""

    beta_fast: float = 32.0
    """yarn: pairs that turn more often in the original length keep their frequency."""

    beta_slow: float = 1.0
    """yarn: pairs that turn less often are divided by the factor."""

    mscale: float = 1.0
    """yarn: coefficient of the factor on cosines and sines."""

    mscale_all_dim: float = 0.0
    """yarn: coefficient of the factor on all scores, by which that on cosines and sines is divided."""

    rope_low_freq_factor: float = 1.0
    """llama3: pairs that turn less often in the original length are divided by the factor."""

    rope_high_freq_factor: float = 4.0
    """llama3: pairs that turn more often keep their frequency."""

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(f"rope_type is {self.rope_type!r}; expected one of {', '.join(ROPE_TYPES)}")
        if self.rope_type == "rope":
            return
        for name in ("rotary_scaling_factor", "original_max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)} with rope_type {self.rope_type}; expected 1 or more"
                )
        for low, high, kind in (
            ("beta_slow", "beta_fast", "yarn"),
            ("rope_low_freq_factor", "rope_high_freq_factor", "llama3"),
        ):
            if self.rope_type == kind and not 0 < getattr(self, low) < getattr(self, high):
                raise ConfigError(
                    f"{low} is {getattr(self, low)} and {high} is {getattr(self, high)} with rope_type "
                    f"{kind}; expected 0 < {low} < {high}, turns in the original length"
                )


def rope_scaling_of(config: Any) -> RopeScaling:
    """What a TransformerConfig says; one without these fields says ``rope``."""
    names = RopeScaling.__dataclass_fields__
    return RopeScaling(**{name: getattr(config, name) for name in names if hasattr(config, name)})


def inverse_frequencies(dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """fp32 [dim / 2] on the host: radians per position of each pair of a head's ``dim`` rotary numbers.

    ``base`` is theta of the model (``rotary_base``). Raises ConfigError for an odd ``dim`` or a base
    that is not above 1.
    """
    if dim < 2 or dim % 2 or base <= 1:
        raise ConfigError(
            f"rotary positions of {dim} numbers to base {base}; expected an even number of them and a base "
            "above 1. Change the head's rotary size (qk_pos_emb_head_dim, kv_channels x rotary_percent) or "
            "rotary_base"
        )
    plain = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
    factor = scaling.rotary_scaling_factor
    if scaling.rope_type == "linear":
        return plain / factor
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling)
    if scaling.rope_type == "yarn":
        share = interpolated_share(
            dim,
            base,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
        )
        return plain / factor * share + plain * (1 - share)
    return plain


def rotary_factor(scaling: RopeScaling) -> float:
    """What cosines and sines are multiplied by: YaRN's ``m(mscale) / m(mscale_all_dim)``, else 1.

    With both coefficients equal, as in every published DeepSeek model, it is 1; with the defaults
    (1 and 0) it is the ``0.1 ln(factor) + 1`` of the paper.
    """
    if scaling.rope_type != "yarn":
        return 1.0
    factor = scaling.rotary_scaling_factor
    return magnitude(factor, scaling.mscale) / magnitude(factor, scaling.mscale_all_dim)


def softmax_factor(scaling: RopeScaling) -> float:
    """What the scores of multi-latent attention are multiplied by besides ``1 / sqrt(d)``:
    ``m(mscale_all_dim) ** 2`` with YaRN, as published.

    Megatron-Core 0.12 takes ``mscale`` here, which is the same number wherever both are equal.
    """
    if scaling.rope_type != "yarn":
        return 1.0
    return magnitude(scaling.rotary_scaling_factor, scaling.mscale_all_dim) ** 2


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = scaling.rope_low_freq_factor, scaling.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.rotary_scaling_factor + kept * plain


# YaRN, arXiv:2309.00071. DeepSeek's attention scaling with two coefficients is in its published
# ``modeling_deepseek.py``.


def interpolated_share(
    dim: int,
    base: float,
    *,
    original_max_position_embeddings: int,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """fp32 [dim / 2]: 0 where a pair keeps its frequency, 1 where it is divided by the factor.

    NTK-by-parts, section 3.2. Pair i turns
    ``original_max_position_embeddings / (2 pi base ** (2 i / dim))`` times in the length that the model was
    trained with. Pairs of more than ``beta_fast`` turns keep their frequency, those
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
    """Attention scaling (section 3.4): ``0.1 coefficient ln(factor) + 1``; 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0
