"""Hugging Face's ``MixtralForCausalLM`` as its files have it: one set of matrices for each expert."""

from __future__ import annotations

from typing import Any

from mt_megatron.models.tables.decoder import (
    LAYER,
    PUBLISHED_LAYER,
    as_built,
    attention,
    ends,
    experts,
    norms,
)
from mt_megatron.models.weights import TensorRow


def table(config: Any) -> dict[str, TensorRow]:
    """The rows of a Mixtral; ``config`` is a ``TrainingConfig``."""
    mixture = PUBLISHED_LAYER + "block_sparse_moe."
    rows = {
        **ends(config),
        **norms(LAYER, PUBLISHED_LAYER),
        **attention(config, LAYER, PUBLISHED_LAYER),
        **experts(config, LAYER + "mlp.", mixture, names=("w1", "w3", "w2")),
    }
    return as_built(config, rows)
