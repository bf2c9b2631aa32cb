"""Capacity per expert: the tokens that an expert keeps, in the form that the dispatchers take.

Megatron-Core 0.9.0's meaning and shapes, with two differences. Among equal weights, and under the
policy ``position``, earlier tokens come first; upstream leaves that to ``torch.topk``, which promises
no order. A capacity above the number of tokens means that number instead of an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.layers.moe.router_topk import Routing, lowest_index_topk

DROPPED: int = torch.iinfo(torch.long).max
"""The expert of an assignment that was dropped, as upstream's dispatchers know it."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How many tokens an expert takes, and which."""

    factor: float
    """Times its share of tokens x topk, were all experts equally busy."""

    pad: bool = False
    """Whether experts with fewer tokens get others on top, with weight 0."""

    policy: str = "probs"
    """``probs``: the tokens with the largest weights; ``position``: the first ones."""

    @classmethod
    def of(cls, config: Any) -> Capacity | None:
        """That of a ``TransformerConfig``; None: every token goes where it was routed (dropless)."""
        if config.moe_expert_capacity_factor is None:
            return None
        return cls(
            factor=config.moe_expert_capacity_factor,
            pad=config.moe_pad_expert_input_to_capacity,
            policy=config.moe_token_drop_policy,
        )

    def tokens(self, num_tokens: int, topk: int, num_experts: int) -> int:
        """Tokens that one expert takes, of ``num_tokens`` on this rank."""
        share = num_tokens * topk / num_experts
        return min(num_tokens, math.ceil(share * self.factor))


@dataclass(frozen=True, kw_only=True)
class Limited:
    """A routing under a capacity, in the two shapes that upstream's dispatchers take."""

    probs: Tensor
    """[tokens, topk], 0 where dropped; padded: [num_experts, capacity], 0 for padding."""

    indices: Tensor
    """int64: experts [tokens, topk], ``DROPPED`` where dropped; padded: tokens [num_experts, capacity]."""

    dropped: Tensor
    """int64 scalar: assignments that no expert takes."""


def limit(routing: Routing, capacity: Capacity, num_experts: int) -> Limited:
    """``routing`` with at most the capacity's tokens per expert. Nothing waits for the device."""
    weights, indices = routing.weights, routing.indices
    tokens, topk = indices.shape
    size = capacity.tokens(tokens, topk, num_experts)
    chosen = torch.zeros(tokens, num_experts, dtype=torch.bool, device=indices.device)
    chosen.scatter_(1, indices, True)
    gates = weights.new_zeros(tokens, num_experts).scatter(1, indices, weights)
    taken = _taken(gates, chosen, size, capacity.policy)
    keep = torch.zeros_like(chosen.t()).scatter_(1, taken, True).t()
    kept = keep.gather(1, indices)
    dropped = (~kept).sum()
    if capacity.pad:
        return Limited(probs=gates.t().gather(1, taken), indices=taken, dropped=dropped)
    return Limited(probs=weights * kept, indices=indices.masked_fill(~kept, DROPPED), dropped=dropped)


def _taken(gates: Tensor, chosen: Tensor, size: int, policy: str) -> Tensor:
    """Tokens of every expert, int64 [num_experts, size]: the routed ones first."""
    if policy == "probs":
        # Below any weight, so that a weight that is 0 still comes before what was not routed here.
        rank = gates.detach().masked_fill(~chosen, -1.0)
    elif policy == "position":
        rank = chosen.float()
    else:
        raise ConfigError(f"moe_token_drop_policy is {policy!r}; expected probs or position")
    return lowest_index_topk(rank.t(), size)
