"""The order in which Megatron's modules hold a model's tensors; an optimizer in rank files counts by it."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.")

_PARTS = ("embedding.", "decoder.layers.", "decoder.final_layernorm.", "output_layer.", "mtp.")

_IN_A_LAYER = (
    "enorm.",
    "hnorm.",
    "eh_proj.",
    "input_layernorm.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.kv_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "final_layernorm.",
)


def module_order(name: str, *, is_first_stage: bool) -> tuple[int, ...]:
    """Sorts the tensors of one chunk of a model, as local layers or Transformer Engine's name them."""
    layer = _LAYER.fullmatch(name)
    if name.startswith("embedding.") and not is_first_stage:
        return (len(_PARTS),)  # The copy for multi-token prediction, which is made last.
    if layer is None:
        return (_first(_PARTS, name),)
    rest = layer[3].removeprefix("transformer_layer.")
    expert = _EXPERT.search(rest)
    within = 2 * rest.endswith("bias") - ("layer_norm_" in rest)
    return (
        _first(_PARTS, name),
        int(layer[2]),
        _first(_IN_A_LAYER, rest),
        -1 if expert is None else int(expert[1]),
        int("linear_fc2" in rest),
        within,
    )


def _first(parts: tuple[str, ...], name: str) -> int:
    return next((index for index, part in enumerate(parts) if name.startswith(part)), len(parts))
