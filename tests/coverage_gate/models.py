"""The small models that the gate's named tests build; importing this imports no megatron."""

from __future__ import annotations

from typing import Any

from tests.coverage_gate.target import DEVICE, torch

VOCABULARY = 64


def config(**changes: Any) -> Any:
    """A two-layer ``TransformerConfig`` without dropout, initialised on the device."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "ffn_hidden_size": 32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**{**defaults, **changes})


def gpt(settings: Any, **changes: Any) -> Any:
    """A GPT of upstream's local (torch only) layers with rotary embeddings."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(settings.num_moe_experts, settings.moe_grouped_gemm)
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": 32,
        "position_embedding_type": "rope",
        "parallel_output": True,
    }
    return GPTModel(settings, spec, **{**options, **changes}).to(DEVICE)


def positions(tokens: torch.Tensor) -> torch.Tensor:
    """Position ids of a batch of shape ``[batch, sequence]``."""
    return torch.arange(tokens.size(1)).expand_as(tokens)
