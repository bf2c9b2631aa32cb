"""Multi-token prediction in plain torch, by loops over positions: the oracle of ``test_mtp.py``.

It reads nothing of the package: weights by name, tokens, masks and documents go in, losses come out,
from which autograd makes gradients. A Llama with grouped-query attention; float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model."""

    layers: int
    heads: int
    groups: int
    depths: int
    factor: float
    eps: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class Example:
    """A micro-batch [b, s] and what counts of it; ``documents`` numbers the document of every token."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    documents: Tensor
    apart: bool
    """Whether attention stops at the borders of documents."""


def losses(weights: Weights, shape: Shape, example: Example, *, shift_mask: bool = True) -> list[Tensor]:
    """The main loss and those of every depth, each the mean over what it counts.

    ``shift_mask`` False is the mistake of taking the main loss's mask for every depth.
    """
    batch, length = example.tokens.shape
    hidden = weights["embedding"][example.tokens]
    for layer in range(shape.layers):
        hidden = _layer(weights, f"decoder.layers.{layer}.", shape, example, hidden)
    hidden = _norm(hidden, weights["decoder.final_layernorm.weight"], shape)
    found = [_cross_entropy(weights, hidden, example.labels, example.mask)]
    for depth in range(1, shape.depths + 1):
        name = f"mtp.layers.{depth - 1}."
        tokens = torch.zeros_like(example.tokens)
        labels = torch.zeros_like(example.labels)
        mask = torch.zeros_like(example.mask)
        for row in range(batch):
            for at in range(length):
                if at + depth < length:
                    tokens[row, at] = example.tokens[row, at + depth]
                    labels[row, at] = example.labels[row, at + depth]
                    if _in_one_document(example.documents[row], at, depth):
                        mask[row, at] = example.mask[row, at + depth if shift_mask else at]
        embedding = _norm(weights["embedding"][tokens], weights[name + "enorm.weight"], shape)
        hidden = _norm(hidden, weights[name + "hnorm.weight"], shape)
        hidden = torch.cat((embedding, hidden), dim=-1) @ weights[name + "eh_proj.weight"].t()
        hidden = _layer(weights, name + "transformer_layer.", shape, example, hidden)
        hidden = _norm(hidden, weights[name + "final_layernorm.weight"], shape)
        found.append(_cross_entropy(weights, hidden, labels, mask))
    return found


def total(found: list[Tensor], shape: Shape) -> Tensor:
    """The loss of the micro-batch (arXiv:2412.19437, equation 25)."""
    return found[0] + shape.factor / shape.depths * sum(found[1:], torch.zeros((), dtype=torch.float64))


def _in_one_document(documents: Tensor, at: int, depth: int) -> bool:
    """Whether the tokens that depth reads from ``at`` on, and its target as far as it is an input, are."""
    seen = range(at, min(at + depth + 2, len(documents)))
    return len({int(documents[each]) for each in seen}) == 1


def _norm(hidden: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    return hidden / (hidden.pow(2).mean(dim=-1, keepdim=True) + shape.eps).sqrt() * weight


def _cross_entropy(weights: Weights, hidden: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    logits = hidden @ weights["output"].t()
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for row in range(labels.shape[0]):
        for at in range(labels.shape[1]):
            if mask[row, at]:
                total = total - torch.log_softmax(logits[row, at], dim=-1)[labels[row, at]]
                count += 1.0
    return total / max(count, 1.0)


def _layer(weights: Weights, name: str, shape: Shape, example: Example, hidden: Tensor) -> Tensor:
    normed = _norm(hidden, weights[name + "input_layernorm.weight"], shape)
    hidden = hidden + _attention(weights, name + "self_attention.", shape, example, normed)
    normed = _norm(hidden, weights[name + "pre_mlp_layernorm.weight"], shape)
    gate, up = (normed @ weights[name + "mlp.linear_fc1.weight"].t()).chunk(2, dim=-1)
    return hidden + (torch.nn.functional.silu(gate) * up) @ weights[name + "mlp.linear_fc2.weight"].t()


def _attention(weights: Weights, name: str, shape: Shape, example: Example, hidden: Tensor) -> Tensor:
    batch, length, size = hidden.shape
    head, per_group = size // shape.heads, shape.heads // shape.groups
    packed = hidden @ weights[name + "linear_qkv.weight"].t()
    packed = packed.view(batch, length, shape.groups, per_group + 2, head)
    outputs = []
    for number in range(shape.heads):
        group = number // per_group
        query = _rotated(packed[:, :, group, number % per_group], example)
        key, value = _rotated(packed[:, :, group, per_group], example), packed[:, :, group, per_group + 1]
        scores = query @ key.transpose(1, 2) / head**0.5
        for row in range(batch):
            for at in range(length):
                for other in range(length):
                    apart = example.apart and example.documents[row, at] != example.documents[row, other]
                    if other > at or apart:
                        scores[row, at, other] = -torch.inf
        outputs.append(scores.softmax(dim=-1) @ value)
    return torch.cat(outputs, dim=-1) @ weights[name + "linear_proj.weight"].t()


def _rotated(value: Tensor, example: Example) -> Tensor:
    # Only differences of positions matter within a document: 0, 1, 2 ... of the sequence will do.
    half = value.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(value.shape[1], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = value[..., :half], value[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
