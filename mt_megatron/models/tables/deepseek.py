"""Hugging Face's ``DeepseekV2ForCausalLM`` and ``DeepseekV3ForCausalLM``, and V3's layers of multi-token
prediction, which published files hold as further layers behind the last.

Rotary dimensions are interleaved on both sides. A prediction layer's file repeats the embedding and
the output layer, which it shares with the model (DeepSeek-V3's README_WEIGHTS; arXiv:2412.19437, 2.2).
"""

from __future__ import annotations

from typing import Any

from mt_megatron.models.tables.decoder import (
    LAYER,
    PUBLISHED_LAYER,
    Layers,
    Rows,
    as_built,
    dense_mlp,
    ends,
    experts,
    norms,
    split_layers,
)
from mt_megatron.models.weights import TensorRow


def table(config: Any) -> dict[str, TensorRow]:
    """The rows of a DeepSeek-V2 or V3; ``config`` is a ``TrainingConfig``."""
    model = config.model
    dense, mixed = split_layers(config)
    depths = range(model.mtp_num_layers or 0)
    behind = [f"model.layers.{model.num_layers + depth}." for depth in depths]
    rows = {
        **ends(
            config,
            embedding_copies=tuple(each + "embed_tokens.weight" for each in behind),
            head_copies=tuple(each + "shared_head.head.weight" for each in behind),
        ),
        **norms(LAYER, PUBLISHED_LAYER),
        **latent_attention(config, LAYER, PUBLISHED_LAYER),
    }
    if dense:
        rows |= dense_mlp(LAYER + "mlp.", PUBLISHED_LAYER + "mlp.", dense)
    if mixed:
        rows |= mixture(config, LAYER + "mlp.", PUBLISHED_LAYER + "mlp.", mixed)
    for depth, theirs in zip(depths, behind, strict=True):
        rows |= prediction_layer(config, f"mtp.layers.{depth}.", theirs, is_moe=bool(mixed))
    return as_built(config, rows)


def latent_attention(config: Any, ours: str, theirs: str) -> Rows:
    """Multi-latent attention, with or without compressed queries."""
    ours, theirs = ours + "self_attention.", theirs + "self_attn."
    if config.model.q_lora_rank is None:
        query = {"linear_q_proj": "q_proj"}
    else:
        query = {
            "linear_q_down_proj": "q_a_proj",
            "q_layernorm": "q_a_layernorm",
            "linear_q_up_proj": "q_b_proj",
        }
    names = query | {
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
    }
    return {
        f"{ours}{mine}.weight": TensorRow(
            sources=(f"{theirs}{published}.weight",), block_scaled=mine.startswith("linear")
        )
        for mine, published in names.items()
    }


def mixture(config: Any, ours: str, theirs: str, layers: Layers = None) -> Rows:
    """Router with its expert bias, routed experts, shared experts as the one network that they are."""
    rows = experts(config, ours, theirs, layers)
    if config.model.moe_router_enable_expert_bias:
        rows[ours + "router.expert_bias"] = TensorRow(
            sources=(theirs + "gate.e_score_correction_bias",), layers=layers, fp32=True
        )
    if config.model.moe_shared_expert_intermediate_size is not None:
        rows |= dense_mlp(ours + "shared_experts.", theirs + "shared_experts.", layers)
    return rows


def prediction_layer(config: Any, ours: str, theirs: str, *, is_moe: bool) -> Rows:
    """One depth of multi-token prediction: two norms, the projection, a whole decoder layer, a norm."""
    inner = ours + "transformer_layer."
    rows = {
        f"{ours}{mine}.weight": TensorRow(sources=(f"{theirs}{published}.weight",))
        for mine, published in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("eh_proj", "eh_proj"),
            ("final_layernorm", "shared_head.norm"),
        )
    }
    rows |= norms(inner, theirs) | latent_attention(config, inner, theirs)
    feed_forward = mixture if is_moe else _dense
    return rows | feed_forward(config, inner + "mlp.", theirs + "mlp.")


def _dense(config: Any, ours: str, theirs: str) -> Rows:
    return dense_mlp(ours, theirs)
