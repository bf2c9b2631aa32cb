"""MLA's place in Megatron-Core's layer specs, with the linear and norm classes that a spec already has."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from .attention import DotProductAttention
from .mla_replicated import ReplicatedLinear

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
    Transformer Engine's spec."""
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


def replaced(self_attention: ModuleSpec, module: type) -> ModuleSpec:
    """The spec of ``module`` in the place of ``self_attention``, with the latter's parameters."""
    return ModuleSpec(
        module=module,
        params=dict(self_attention.params),
        submodules=mla_submodules(self_attention.submodules),
    )


def _column_and_norm(given: Any) -> tuple[Any, Any]:
    beside = sys.modules[given.linear_qkv.__module__]
    if given.linear_qkv is getattr(beside, "TELayerNormColumnParallelLinear", None):
        # It holds the norm of the layer's input, which goes through several linears here.
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
