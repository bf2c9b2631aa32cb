"""MLA's place in Megatron-Core's layer specs, with the linear and norm classes that a spec already has."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from mt_megatron.layers.attention.core import DotProductAttention
from mt_megatron.layers.mla.replicated_linear import ReplicatedLinear

_log = logging.getLogger("mt_megatron")


@dataclass(kw_only=True)
class MLASelfAttentionSubmodules:
    """Classes or specs of MLA's parts, by Megatron-Core 0.12's names; scripts exchange them."""

    linear_q_proj: Any = None
    """hidden -> heads, where there is no latent of queries (``q_lora_rank`` None)."""

    linear_q_down_proj: Any = None
    """hidden -> the queries' latent; every rank has all of it."""

    linear_q_up_proj: Any = None
    """The queries' latent -> heads."""

    linear_kv_down_proj: Any = None
    """hidden -> the keys' and values' latent and the shared rotary key; every rank has all of it."""

    linear_kv_up_proj: Any = None
    """The latent -> heads, of each first its key and then its value."""

    core_attention: Any = None
    """Built with ``softmax_scale``, and called with values of another head size than keys'."""

    linear_proj: Any = None
    """heads -> hidden."""

    q_layernorm: Any = None
    """Of the queries' latent."""

    kv_layernorm: Any = None
    """Of the keys' and values' latent."""


def mla_submodules(given: Any) -> MLASelfAttentionSubmodules:
    """MLA's parts in the place of ``given``, a ``SelfAttentionSubmodules`` of the local or of
    Transformer Engine's spec; ``given`` itself where they are MLA's already."""
    if isinstance(given, MLASelfAttentionSubmodules):
        return given
    column, norm = _column_and_norm(given)
    if given.core_attention is not DotProductAttention:
        _say_core_attention(getattr(given.core_attention, "__name__", str(given.core_attention)))
    return MLASelfAttentionSubmodules(
        linear_q_proj=column,
        linear_q_down_proj=ReplicatedLinear,
        linear_q_up_proj=column,
        linear_kv_down_proj=ReplicatedLinear,
        linear_kv_up_proj=column,
        core_attention=DotProductAttention,
        linear_proj=given.linear_proj,
        q_layernorm=norm,
        kv_layernorm=norm,
    )


def norm_is_in_linear(given: Any) -> bool:
    """Whether the parts ``given`` include the norm of the layer's input, as Transformer Engine's do."""
    return not isinstance(given, MLASelfAttentionSubmodules) and given.linear_qkv is getattr(
        sys.modules[given.linear_qkv.__module__], "TELayerNormColumnParallelLinear", None
    )


def _column_and_norm(given: Any) -> tuple[Any, Any]:
    if norm_is_in_linear(given):
        beside: Any = sys.modules[given.linear_qkv.__module__]
        return beside.TEColumnParallelLinear, beside.TENorm
    from megatron.core.models.gpt import gpt_layer_specs

    return given.linear_qkv, gpt_layer_specs.LNImpl


@cache
def _say_core_attention(name: str) -> None:
    _log.info(
        "multi_latent_attention: core attention by mt_megatron's DotProductAttention in the place of %s, "
        "which in 0.9.0 takes neither a softmax scale nor values of another head size",
        name,
    )
