"""A T5 of Megatron-Core small enough for any test, and the same model written out in plain torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.patches import small_gpt

VOCABULARY, SOURCE, TARGET, BATCH, HEADS, LAYERS = 32, 8, 6, 2, 4, 2
SPECS = ("local", "transformer_engine")
_FILL = -10000.0
"""What Megatron writes over scores that a mask excludes."""


def build(spec: str = "local", *, tied: bool = True, config: dict[str, Any] | None = None) -> Any:
    """The model, or this pipeline stage of it, with weights that depend on their names alone."""
    from megatron.core import parallel_state
    from megatron.core.models.T5 import T5Model, t5_spec

    values = {
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "activation_func": F.gelu,
        "bias_activation_fusion": False,
        "num_query_groups": HEADS,
        "num_layers": LAYERS,
        # As Megatron-LM has it: each half divides its layers over its own stages.
        "pipeline_model_parallel_size": 1,
        **(config or {}),
    }
    encoder_config, decoder_config = (small_gpt.transformer_config(**values) for _ in range(2))
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    specs = (
        getattr(t5_spec, f"get_t5_{half}_with_{spec}_block_spec")(LAYERS) for half in ("encoder", "decoder")
    )
    model = T5Model(
        decoder_config,
        encoder_config,
        *specs,
        VOCABULARY,
        SOURCE,
        share_embeddings_and_output_weights=tied,
        add_encoder=stages == 1 or parallel_state.is_inside_encoder(),
        add_decoder=stages == 1 or parallel_state.is_inside_decoder(),
    )
    return model


def fill(model: Any) -> None:
    """Give each parameter values that depend on its name in the local spec alone."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(small_gpt.full_weight(local_name(name), parameter, 1))


def local_name(name: str) -> str:
    """The name in the local spec of a parameter that the Transformer Engine spec keeps in a linear."""
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
        "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    )


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Tokens, labels and masks (true where attention is not allowed) as T5's data set makes them; the last
    tokens of the second sample are padding."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(1, VOCABULARY, (BATCH, SOURCE), generator=generator)
    target = torch.randint(1, VOCABULARY, (BATCH, TARGET + 1), generator=generator)
    source[1, -3:] = target[1, -2:] = 0
    tokens, labels = target[:, :-1].clone(), target[:, 1:].clone()
    tokens[1, -2:], labels[1, -2:] = 0, -1
    causal = torch.ones(TARGET, TARGET, dtype=torch.bool).tril()

    def mask(rows: Tensor, columns: Tensor) -> Tensor:
        return ~((rows > 0)[:, :, None] & (columns > 0)[:, None, :])

    return {
        "encoder_input_ids": source,
        "decoder_input_ids": tokens,
        "encoder_attn_mask": mask(source, source),
        "decoder_attn_mask": mask(tokens, tokens) | ~causal,
        "encoder_decoder_attn_mask": mask(tokens, source),
        "lm_labels": labels,
    }


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over the labels that are not -1."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def reference(w: dict[str, Tensor], data: dict[str, Tensor]) -> Tensor:
    """Logits (batch, target, vocabulary) from parameters by their names in the local spec."""
    x = _embedded(w, data["encoder_input_ids"])
    for layer in range(LAYERS):
        at = f"encoder.layers.{layer}."
        x = _self_attention(w, at, x, data["encoder_attn_mask"])
        x = _mlp(w, at, x)
    encoded = _norm(w, "encoder.final_layernorm", x)
    y = _embedded(w, data["decoder_input_ids"])
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}."
        y = _self_attention(w, at, y, data["decoder_attn_mask"])
        y = _cross_attention(w, at, y, encoded, data["encoder_decoder_attn_mask"])
        y = _mlp(w, at, y)
    y = _norm(w, "decoder.final_layernorm", y)
    if "lm_head.output_layer.weight" in w:  # Untied, and then without a bias.
        return y @ w["lm_head.output_layer.weight"].T
    return y @ w["embedding.word_embeddings.weight"].T + w["lm_head.output_layer.bias"]


def _embedded(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    positions: Tensor = w["embedding.position_embeddings.weight"][: tokens.size(1)]
    return w["embedding.word_embeddings.weight"][tokens] + positions


def _self_attention(w: dict[str, Tensor], at: str, x: Tensor, mask: Tensor) -> Tensor:
    normed = _norm(w, at + "input_layernorm", x)
    # Megatron packs query, key and value of one head next to each other.
    q, k, v = _linear(w, at + "self_attention.linear_qkv", normed).unflatten(-1, (HEADS, 3, -1)).unbind(3)
    return x + _linear(w, at + "self_attention.linear_proj", _attended(q, k, v, mask))


def _cross_attention(w: dict[str, Tensor], at: str, y: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
    normed = _norm(w, at + "pre_cross_attn_layernorm", y)
    q = _linear(w, at + "cross_attention.linear_q", normed).unflatten(-1, (HEADS, -1))
    k, v = _linear(w, at + "cross_attention.linear_kv", encoded).unflatten(-1, (HEADS, 2, -1)).unbind(3)
    return y + _linear(w, at + "cross_attention.linear_proj", _attended(q, k, v, mask))


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[b, sq, heads, d] attends to [b, sk, heads, d]; a head and a sample at a time."""
    out = torch.empty_like(q)
    for sample in range(q.size(0)):
        for head in range(HEADS):
            scores = q[sample, :, head] @ k[sample, :, head].T / math.sqrt(q.size(-1))
            scores = torch.where(mask[sample], torch.full_like(scores, _FILL), scores)
            weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
            out[sample, :, head] = weights / weights.sum(-1, keepdim=True) @ v[sample, :, head]
    return out.flatten(2)


def _mlp(w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    hidden = _linear(w, at + "mlp.linear_fc1", _norm(w, at + "pre_mlp_layernorm", x))
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    return x + _linear(w, at + "mlp.linear_fc2", hidden)


def _norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
