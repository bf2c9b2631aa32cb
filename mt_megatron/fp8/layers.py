"""Layers of a model that stay in bf16 under a recipe, and why. Imports neither torch nor Megatron."""

from __future__ import annotations

from typing import Any

FEATURES = 16
"""Inputs and outputs of an FP8 product must be multiples of it on each rank: what kernels ask for."""

OUTPUT_LAYER = "output_layer"
"""The output layer's name, as a linear and in a checkpoint."""

SENSITIVE = "the loss is sensitive to its logits (fp8_output_layer)"
"""Why the output layer stays in bf16 by default."""

ALWAYS_BF16 = {
    "embedding": "a table that is read, no product",
    "router": "the choice of experts is sensitive to its logits",
    "norms": "no product",
    "core attention": "no linear",
}
"""Part of the model -> why no recipe covers it."""


def run_recipe(model: Any) -> str | None:
    """Recipe of a run of the trainer, by the section ``model`` of its configuration. ``fp8``, upstream's name
    of a format, means delayed scaling: by Transformer Engine where its layers were asked for by name, which
    is no recipe, and by ours otherwise, whether it is installed or not."""
    if model.fp8_recipe is not None:
        return str(model.fp8_recipe)
    return None if model.fp8 is None or model.transformer_impl == "transformer_engine" else "delayed"


def layer_reason(number: int, config: Any) -> str | None:
    """Why layer ``number`` (from 1, depths of multi-token prediction after the last) stays in bf16; None
    when it does not. ``config`` has the fields of ``TransformerConfig`` as attributes."""
    if not config.first_last_layers_bf16:
        return None
    first, last = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    if number <= first:
        return f"among the first {first} (num_layers_at_start_in_bf16)"
    if last and number > config.num_layers - last:
        return f"among the last {last} (num_layers_at_end_in_bf16)"
    return None
