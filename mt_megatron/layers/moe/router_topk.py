"""Top-k selection of experts and their weights: scores, groups and exact ties.

Sources: Switch and Mixtral (softmax), DeepSeek-V2 (arXiv:2405.04434, section 2.2: groups judged by
their best expert, weights not normalised), DeepSeek-V3 (arXiv:2412.19437, section 2.1.2: sigmoid
scores, a bias that only chooses, groups judged by their two best experts, weights normalised).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """How a router chooses; the fields are those of ``TransformerConfig`` without ``moe_router_``."""

    num_experts: int
    topk: int
    score_function: str = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    group_score_topk: int | None = None
    topk_scaling_factor: float | None = None

    @classmethod
    def of(cls, config: Any) -> RouterOptions:
        """Those of a ``TransformerConfig``. Raises ``ConfigError`` when they contradict each other."""
        options = cls(
            num_experts=config.num_moe_experts,
            topk=config.moe_router_topk,
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            group_score_topk=config.moe_router_group_score_topk,
            topk_scaling_factor=config.moe_router_topk_scaling_factor,
        )
        if config.moe_router_load_balancing_type != "sinkhorn":
            options.check()
        return options

    def check(self) -> None:
        """Raises ``ConfigError`` for what no router can do."""
        if self.topk > self.num_experts:
            raise ConfigError(
                f"moe_router_topk is {self.topk}; expected at most num_moe_experts = {self.num_experts}. "
                "Change moe_router_topk"
            )


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where tokens go, before any capacity."""

    weights: Tensor
    """[tokens, topk] in the logits' type, largest score first; gradients flow to the logits."""

    indices: Tensor
    """int64 [tokens, topk], experts in the order of ``weights``."""


def choose_experts(logits: Tensor, options: RouterOptions, bias: Tensor | None = None) -> Routing:
    """Experts and weights of every token.

    ``logits`` are [tokens, num_experts]; ``bias`` is float32 [num_experts] and takes part in the
    choice alone: weights are made of the unbiased scores. Among exactly equal scores, and groups,
    the lowest index wins. Nothing waits for the device.
    """
    if options.score_function == "sigmoid":
        weights, indices = _by_sigmoid(logits, options, bias)
    elif options.score_function == "softmax":
        weights, indices = _by_softmax(logits, options)
    else:
        raise ConfigError(
            f"moe_router_score_function is {options.score_function!r}; expected softmax or sigmoid"
        )
    if options.topk_scaling_factor is not None:
        weights = weights * options.topk_scaling_factor
    return Routing(weights=weights.type_as(logits), indices=indices)


def _by_softmax(logits: Tensor, options: RouterOptions) -> tuple[Tensor, Tensor]:
    wide = score_type(logits)
    if options.pre_softmax:
        scores = torch.softmax(logits, dim=-1, dtype=wide).type_as(logits)
        indices = best_experts(scores, options)
        return scores.gather(1, indices), indices
    indices = best_experts(logits, options)
    chosen = logits.gather(1, indices)
    return torch.softmax(chosen, dim=-1, dtype=wide).type_as(logits), indices


def score_type(logits: Tensor) -> torch.dtype:
    """The type of scores: float32, or that of wider ``logits``."""
    return torch.promote_types(logits.dtype, torch.float32)


def _by_sigmoid(logits: Tensor, options: RouterOptions, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = score_type(logits)
    with torch.no_grad():
        scores = _sigmoid(logits).to(wide).type_as(logits)
        choosers = scores if bias is None else scores + bias
        indices = best_experts(choosers, options)
    # Scores of the chosen alone: the others have no part in the weights, nor a gradient.
    weights = _sigmoid(logits.gather(1, indices))
    if options.topk > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights.to(wide), indices


def _sigmoid(logits: Tensor) -> Tensor:
    """Sigmoid in ``_same_everywhere``'s type: rounded to ``score_type``, equal for equal logits."""
    if logits.dtype is torch.float64 and logits.device.type == "cpu":
        # No rounding hides sigmoid's last bits; softmax has one formula for all places.
        pairs = torch.stack((logits, torch.zeros_like(logits)), dim=-1)
        return torch.softmax(pairs, dim=-1)[..., 0]
    return torch.sigmoid(logits.to(_same_everywhere(logits)))


def _same_everywhere(logits: Tensor) -> torch.dtype:
    """The type to compute scores in, so that rounded to float32 they are the same for equal logits.

    On a CPU, torch computes the last few numbers of a block by another formula than the others, and
    their last bits may differ: equal experts would no longer tie.
    """
    return torch.float64 if logits.device.type == "cpu" else score_type(logits)


def best_experts(scores: Tensor, options: RouterOptions) -> Tensor:
    """The ``topk`` best of [tokens, num_experts], int64 [tokens, topk]; of the best groups, where there
    are groups."""
    scores = scores.detach()
    if options.group_topk is None or options.num_groups is None:
        return lowest_index_topk(scores, options.topk)
    size = options.num_experts // options.num_groups
    members = scores.view(-1, options.num_groups, size)
    groups = _best_groups(members, options, options.group_topk)
    # In the order of their indices, so that places among them are in the order of the experts.
    groups = groups.sort(dim=-1).values
    candidates = members.gather(1, groups.unsqueeze(-1).expand(-1, -1, size)).flatten(1)
    places = lowest_index_topk(candidates, options.topk)
    return groups.gather(1, places // size) * size + places % size


def _best_groups(members: Tensor, options: RouterOptions, chosen: int) -> Tensor:
    """int64 [tokens, chosen] of scores [tokens, groups, experts of a group]."""
    judges = options.group_score_topk or max(1, options.topk // chosen)
    if judges == 1:
        return lowest_index_topk(members.amax(dim=-1), chosen)
    best = members.gather(-1, lowest_index_topk(members, judges))
    return lowest_index_topk(best.to(_same_everywhere(best)).sum(dim=-1).type_as(best), chosen)


def lowest_index_topk(scores: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` largest of the last dimension, int64, largest first.

    Of exactly equal ones the lowest index comes first, which ``torch.topk`` does not promise.
    """
    scores = scores.detach()
    if scores.dtype == torch.float64:
        return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]
    keys = _keys(scores)
    if scores.device.type == "cpu" and k <= _FEW:
        return _one_by_one(keys, k)
    return torch.topk(keys, k, dim=-1).indices


_FEW = 16
"""Up to so many, taking maxima one by one is several times as fast on a CPU as ``torch.topk``."""


def _keys(scores: Tensor) -> Tensor:
    """int64, all different along the last dimension: by score, then by falling index."""
    # Adding 0 makes one zero of two. Flipping a negative number's other bits makes its order an integer's.
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    size = scores.shape[-1]
    return bits.long().mul_(size).add_(torch.arange(size - 1, -1, -1, device=scores.device))


def _one_by_one(keys: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` largest of ``keys``, which are overwritten. A key contains its index."""
    size, found = keys.shape[-1], []
    for _ in range(k):
        largest = keys.amax(dim=-1, keepdim=True)
        index = size - 1 - largest.remainder_(size)
        keys.scatter_(-1, index, torch.iinfo(torch.int64).min)
        found.append(index)
    return torch.cat(found, dim=-1)


def count_tokens(indices: Tensor, num_experts: int) -> Tensor:
    """Tokens per expert, int64 [num_experts], of expert indices of any shape.

    Adds ones instead of ``bincount``, which on an accelerator waits for the largest index.
    """
    flat = indices.reshape(-1)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))
