"""Rows that several families share: embeddings, norms, attention, feed-forward networks, experts.

Every function gives the rows of one part of a layer. ``ours`` and ``theirs`` are the layer's prefixes on
either side, ending in a dot; ``layers`` are the layers that have the part (None: all).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mt_megatron.models.layer_spec import uses_transformer_engine
from mt_megatron.models.tables.fused import fused_name
from mt_megatron.models.weights import RotaryRows, TensorRow

LAYER = "decoder.layers.{layer}."
PUBLISHED_LAYER = "model.layers.{layer}."

Layers = tuple[int, ...] | None
Rows = dict[str, TensorRow]


def ends(config: Any, *, embedding_copies: tuple[str, ...] = (), head_copies: tuple[str, ...] = ()) -> Rows:
    """Embedding, final norm and output layer. ``*_copies`` are repetitions that published files hold.

    Of tied embeddings some files repeat the one matrix as the head; it is understood, not written.
    """
    untied = config.model.untie_embeddings_and_output_weights
    tied = () if untied else ("lm_head.weight",)
    rows = {
        "embedding.word_embeddings.weight": TensorRow(
            sources=("model.embed_tokens.weight",),
            vocabulary=True,
            copies=embedding_copies or tied,
            writes_copies=bool(embedding_copies),
        ),
        "decoder.final_layernorm.weight": TensorRow(sources=("model.norm.weight",)),
    }
    if untied:
        rows["output_layer.weight"] = TensorRow(
            sources=("lm_head.weight",),
            vocabulary=True,
            copies=head_copies,
            writes_copies=bool(head_copies),
        )
    return rows


def norms(ours: str, theirs: str, layers: Layers = None) -> Rows:
    """The two norms of a pre-norm layer."""
    return {
        ours + "input_layernorm.weight": TensorRow(
            sources=(theirs + "input_layernorm.weight",), layers=layers
        ),
        ours + "pre_mlp_layernorm.weight": TensorRow(
            sources=(theirs + "post_attention_layernorm.weight",), layers=layers
        ),
    }


def attention(config: Any, ours: str, theirs: str) -> Rows:
    """Grouped-query attention; with a bias of query, key and value and with norms of query and key where
    the configuration says so."""
    model = config.model
    ours, theirs = ours + "self_attention.", theirs + "self_attn."
    rotary = _interleaved(config)
    rows = {
        ours + "linear_qkv.weight": TensorRow(
            sources=tuple(f"{theirs}{name}_proj.weight" for name in "qkv"),
            packing="query_groups",
            rotary=(rotary, rotary, None) if rotary else (),
            block_scaled=True,
        ),
        ours + "linear_proj.weight": TensorRow(sources=(theirs + "o_proj.weight",), block_scaled=True),
    }
    if model.add_qkv_bias or model.add_bias_linear:
        rows[ours + "linear_qkv.bias"] = TensorRow(
            sources=tuple(f"{theirs}{name}_proj.bias" for name in "qkv"),
            packing="query_groups",
            rotary=(rotary, rotary, None) if rotary else (),
        )
    if model.qk_layernorm:
        for name in "qk":
            rows[f"{ours}{name}_layernorm.weight"] = TensorRow(
                sources=(f"{theirs}{name}_norm.weight",), rotary=(rotary,) if rotary else ()
            )
    return rows


def dense_mlp(
    ours: str, theirs: str, layers: Layers = None, *, names: tuple[str, str, str] | None = None
) -> Rows:
    """A gated feed-forward network. ``names`` are the published gate, up and down projections."""
    gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
    return {
        ours + "linear_fc1.weight": TensorRow(
            sources=(f"{theirs}{gate}.weight", f"{theirs}{up}.weight"),
            packing="stacked",
            layers=layers,
            block_scaled=True,
        ),
        ours + "linear_fc2.weight": TensorRow(
            sources=(f"{theirs}{down}.weight",), layers=layers, block_scaled=True
        ),
    }


def experts(
    config: Any, ours: str, theirs: str, layers: Layers = None, *, names: tuple[str, str, str] | None = None
) -> Rows:
    """Router and experts of a mixture; ``ours`` and ``theirs`` are the prefixes of the mixture."""
    rows = {ours + "router.weight": TensorRow(sources=(theirs + "gate.weight",), layers=layers)}
    each = dense_mlp(ours + "experts.local_experts.{expert}.", theirs + "experts.{expert}.", names=names)
    for name, row in each.items():
        rows[name] = TensorRow(
            sources=row.sources,
            packing=row.packing,
            layers=layers,
            experts=config.model.num_moe_experts,
            block_scaled=True,
        )
    return rows


def split_layers(config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers with a dense feed-forward network, and those with experts."""
    from mt_megatron.layers.transformer_fields import moe_pattern

    model = config.model
    if model.num_moe_experts is None:
        return tuple(range(model.num_layers)), ()
    pattern = moe_pattern(model.moe_layer_freq, model.num_layers)
    return (
        tuple(index for index, is_moe in enumerate(pattern) if not is_moe),
        tuple(index for index, is_moe in enumerate(pattern) if is_moe),
    )


def as_built(config: Any, rows: Rows) -> Rows:
    """``rows`` with the names that the tensors have in the layers that ``config`` is built from."""
    if not uses_transformer_engine(config):
        return rows
    dense, mixed = split_layers(config)
    latent = config.model.multi_latent_attention
    built: Rows = {}
    for name, row in rows.items():
        for layers, is_moe in ((dense, False), (mixed, True)):
            mine = layers if row.layers is None else tuple(each for each in row.layers if each in layers)
            if "{layer}" not in name:
                built[fused_name(name, is_moe=bool(mixed), latent=latent)] = row
            elif mine:
                fused = fused_name(name, is_moe=is_moe, latent=latent)
                already = built[fused].layers or () if fused in built else ()
                built[fused] = replace(row, layers=tuple(sorted({*already, *mine})))
    return built


def _interleaved(config: Any) -> RotaryRows | None:
    model = config.model
    if not model.rotary_interleaved:
        return None
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    return RotaryRows(block=head, size=int(head * model.rotary_percent))
