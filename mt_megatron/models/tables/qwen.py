"""Hugging Face's ``Qwen2ForCausalLM`` (2.5), ``Qwen3ForCausalLM`` and ``Qwen3MoeForCausalLM``."""

from __future__ import annotations

from typing import Any

from mt_megatron.models.tables.decoder import (
    LAYER,
    PUBLISHED_LAYER,
    as_built,
    attention,
    dense_mlp,
    ends,
    experts,
    norms,
    split_layers,
)
from mt_megatron.models.weights import TensorRow


def table(config: Any) -> dict[str, TensorRow]:
    """The rows of a Qwen; ``config`` is a ``TrainingConfig``. Biases (2.5), norms of query and key (3) and
    experts follow from it."""
    ours, theirs = LAYER + "mlp.", PUBLISHED_LAYER + "mlp."
    dense, mixed = split_layers(config)
    rows = {
        **ends(config),
        **norms(LAYER, PUBLISHED_LAYER),
        **attention(config, LAYER, PUBLISHED_LAYER),
    }
    if dense:
        rows |= dense_mlp(ours, theirs, dense)
    if mixed:
        rows |= experts(config, ours, theirs, mixed)
    return as_built(config, rows)
