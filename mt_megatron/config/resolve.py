"""Values by option name to a ``TrainingConfig``: defaults, and what follows from other values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mt_megatron.config.schema import CoreOptions, TrainingConfig, layout_chunks
from mt_megatron.config.types import SECTIONS, options


def assemble(values: Mapping[str, Any], notes: tuple[str, ...] = ()) -> TrainingConfig:
    """A configuration from typed values by option name; every other option takes its default.

    Filled in when absent, as Megatron-LM 0.9 and TransformerConfig do: ``num_query_groups``,
    ``kv_channels``, ``ffn_hidden_size`` (4 x hidden; not for gated units, where the two differ and
    ``validate`` asks for it), ``max_position_embeddings`` for rotary positions,
    ``grad_reduce_in_fp32`` under bf16, ``overlap_p2p_comm`` under the interleaved schedule,
    ``bias_activation_fusion`` with SwiGLU, ``moe_grouped_gemm`` with experts.
    """
    complete = {name: option.default for name, option in options().items()} | dict(values)
    complete |= _derived(complete)
    sections: dict[str, Any] = {}
    for section, owner in SECTIONS.items():
        members = [option for option in options().values() if option.section == section]
        core = CoreOptions({each.name: complete[each.name] for each in members if each.core})
        if owner is None:
            sections[section] = core
            continue
        own = {each.name: complete[each.name] for each in members if not each.core}
        if any(field.name == "core" for field in dataclasses.fields(owner)):
            own["core"] = core
        sections[section] = owner(**own)
    return TrainingConfig(**sections, notes=notes)


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if values["num_query_groups"] is None and heads > 0:
        found["num_query_groups"] = heads
    if values["kv_channels"] is None and heads > 0 and hidden % heads == 0:
        found["kv_channels"] = hidden // heads
    if values["ffn_hidden_size"] is None and not values["gated_linear_unit"]:
        found["ffn_hidden_size"] = 4 * hidden
    if values["max_position_embeddings"] is None and values["position_embedding_type"] != "learned_absolute":
        found["max_position_embeddings"] = values["seq_length"]
    if values["min_lr"] is None:
        found["min_lr"] = 0.0
    if values["grad_reduce_in_fp32"] is None:
        found["grad_reduce_in_fp32"] = values["bf16"]
    if values["overlap_p2p_comm"] is None:
        chunks = values["virtual_pipeline_model_parallel_size"] or 1
        per_chunk = values["num_layers_per_virtual_pipeline_stage"]
        layout, stages = values["pipeline_model_parallel_layout"], values["pipeline_model_parallel_size"]
        if layout not in (None, "balanced"):
            chunks = layout_chunks(layout, stages) or 1
        elif per_chunk and stages > 0:
            chunks = values["num_layers"] // stages // per_chunk
        found["overlap_p2p_comm"] = chunks > 1
    if values["moe_grouped_gemm"] is None:
        # Extended tensor parallelism splits single experts, which only SequentialMLP has.
        found["moe_grouped_gemm"] = values["num_moe_experts"] is not None and not values["moe_extended_tp"]
    if values["bias_activation_fusion"] is None:
        found["bias_activation_fusion"] = values["activation_func"] == "silu" and values["gated_linear_unit"]
    return found
