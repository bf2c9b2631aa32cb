"""The model of small_script.py in plain torch on the host: no Megatron, no patches, one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.upstream.scripts.small_data import SEQUENCE, sample

HEADS, LAYERS = 4, 2


def losses(weights: dict[str, Any], steps: int, batch: int) -> list[float]:
    """Train from ``weights`` (Megatron's names) on ``batch`` new samples a step; the loss of each."""
    parameters = {
        name: value.clone().requires_grad_() for name, value in weights.items() if torch.is_tensor(value)
    }
    # Without a scheduler, which applies them, Megatron's multipliers of weight decay change nothing.
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.1)
    found = []
    for step in range(steps):
        tokens = torch.stack([sample(step * batch + i) for i in range(batch)])
        loss = F.cross_entropy(forward(parameters, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def forward(w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits (batch, sequence, vocabulary) of a GPT with learned positions and tied embeddings."""
    embedding = w["embedding.word_embeddings.weight"]
    x = embedding[tokens] + w["embedding.position_embeddings.weight"][:SEQUENCE]
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}."
        normed = norm(w, at + "input_layernorm", x)
        # Megatron packs query, key and value of one head next to each other.
        packed = linear(w, at + "self_attention.linear_qkv", normed).unflatten(-1, (HEADS, 3, -1))
        q, k, v = packed.transpose(1, 2).unbind(3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(w, at + "self_attention.linear_proj", attended)
        hidden = F.gelu(linear(w, at + "mlp.linear_fc1", norm(w, at + "pre_mlp_layernorm", x)))
        x = x + linear(w, at + "mlp.linear_fc2", hidden)
    return norm(w, "decoder.final_layernorm", x) @ w.get("output_layer.weight", embedding).T


def linear(w: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def norm(w: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)
