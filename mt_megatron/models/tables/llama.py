"""Hugging Face's ``LlamaForCausalLM`` (half-rotated already: nothing is reordered)."""

from __future__ import annotations

from typing import Any

from mt_megatron.models.tables.decoder import (
    LAYER,
    PUBLISHED_LAYER,
    as_built,
    attention,
    dense_mlp,
    ends,
    norms,
)
from mt_megatron.models.weights import TensorRow


def table(config: Any) -> dict[str, TensorRow]:
    """The rows of a dense Llama; ``config`` is a ``TrainingConfig``."""
    rows = {
        **ends(config),
        **norms(LAYER, PUBLISHED_LAYER),
        **attention(config, LAYER, PUBLISHED_LAYER),
        **dense_mlp(LAYER + "mlp.", PUBLISHED_LAYER + "mlp."),
    }
    return as_built(config, rows)
