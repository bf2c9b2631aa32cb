"""Megatron's ``RotaryEmbedding`` with the frequencies that a model's configuration asks for.

Upstream's module knows no configuration. It has no parameters, and its angles are the outer product of
positions and ``inv_freq``: that is all that is changed, after a model has built it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.layers.attention.packed_sequences import document_positions
from mt_megatron.layers.rope.rotation import rotate
from mt_megatron.layers.rope.scaling import RopeScaling, inverse_frequencies, rope_scaling_of, rotary_factor

_UPSTREAM_BASE = 10000


def scale_llama3(rotary: Any, factor: float) -> None:
    """What Megatron-Core 0.12 does for ``rope_scaling=True``: Llama 3.1's frequencies, whose other
    numbers are fixed (8192 tokens before, 1 and 4 turns)."""
    scaling = RopeScaling(
        rope_type="llama3", rotary_scaling_factor=factor, original_max_position_embeddings=8192
    )
    _set(rotary, 2 * len(rotary.inv_freq), rotary.rotary_base, scaling)
    # A base or a size that the model's config sets later makes the frequencies anew, stretched likewise.
    rotary.rope_scaling = scaling


def fit_to_config(model: Any) -> None:
    """Give ``model``'s rotary embedding, if it has one, the base, size and stretching of its config.

    Untouched where the config asks for nothing. Raises ConfigError where the config and the arguments
    of the model contradict each other.
    """
    config, latent = model.config, getattr(model.config, "multi_latent_attention", False)
    scaling = rope_scaling_of(config)
    positions = getattr(model, "position_embedding_type", None)
    if positions != "rope":
        # Latent attention is rotated whatever else the model does with positions.
        if scaling.rope_type != "rope" and not latent:
            raise ConfigError(
                f"rope_type is {scaling.rope_type} and position_embedding_type {positions!r}; expected "
                "position_embedding_type='rope'. Pass it to the model, or leave rope_type out"
            )
        return
    rotary = model.rotary_pos_emb
    base = _base(config, rotary)
    if scaling.rope_type == "rope" and not latent and base == rotary.rotary_base:
        return
    if scaling.rope_type != "rope":
        _check_stretched_once(scaling, rotary)
    else:
        scaling = getattr(rotary, "rope_scaling", scaling)
    size = 2 * len(rotary.inv_freq)
    if latent:
        if getattr(model, "rotary_percent", 1.0) != 1.0:
            raise ConfigError(
                f"rotary_percent is {model.rotary_percent} with multi_latent_attention; expected 1.0: "
                "qk_pos_emb_head_dim says how many numbers of a head are rotated"
            )
        size = config.qk_pos_emb_head_dim
    _set(rotary, size, base, scaling)


def apply_stretched(t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None) -> Tensor | None:
    """``t`` [s, b, heads, d], or [t, heads, d] with ``cu_seqlens``, rotated by ``freqs`` and multiplied by
    the factor of the config's stretching; None where upstream's function does it all: the factor is 1, and
    no pairs of packed sequences are interleaved, which upstream forgets."""
    factor = rotary_factor(rope_scaling_of(config))
    if factor == 1.0 and (cu_seqlens is None or not config.rotary_interleaved):
        return None
    if cu_seqlens is not None:
        positions = document_positions(cu_seqlens.cpu(), 1).squeeze(0)
        freqs = freqs[:, 0][positions.to(freqs.device)]
    return rotate(t, freqs, config.rotary_interleaved, factor)


def _base(config: Any, rotary: Any) -> float:
    configured, given = getattr(config, "rotary_base", None), rotary.rotary_base
    if configured is None or configured == given:
        return float(given)
    if given != _UPSTREAM_BASE:
        raise ConfigError(
            f"rotary_base is {given} as the model's argument and {configured} in its config; expected one "
            "number. Leave one of them out"
        )
    return float(configured)


def _check_stretched_once(scaling: RopeScaling, rotary: Any) -> None:
    others = {
        "seq_len_interpolation_factor": rotary.seq_len_interpolation_factor is not None,
        "rope_scaling": hasattr(rotary, "rope_scaling"),
    }
    for name, is_set in others.items():
        if is_set:
            raise ConfigError(
                f"rope_type is {scaling.rope_type} and {name} is set too; expected one way to stretch "
                "positions. Leave one of them out"
            )


def _set(rotary: Any, size: int, base: float, scaling: RopeScaling) -> None:
    rotary.inv_freq = inverse_frequencies(size, base, scaling).to(rotary.inv_freq.device)
