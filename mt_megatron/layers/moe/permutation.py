"""Permutation of tokens by expert and back: target rows, and row copies without scatter.

A token that chose k experts is k rows of the experts' input. Rows are gathered by index and summed
back by the inverse index, in both directions of autograd, so nothing depends on the order in which
parallel additions arrive. Upstream (``megatron/core/transformer/moe/moe_utils.py``) gathers and
scatters elements with an index expanded to the hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_megatron.seams.grouped_gemm import TokenGroups


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which row of the experts' input is which token's, for ``experts`` neighbouring experts."""

    order: Tensor
    """int64 [rows]: for each row, ``token * topk + choice``; grouped by expert, tokens in order."""

    tokens: Tensor
    """int64 [rows]: ``order // topk``."""

    inverse: Tensor
    """int64 [tokens, topk]: the row of each choice, 0 where it has none."""

    chosen: Tensor | None
    """bool [tokens, topk]: which choices have a row; None when all have."""

    groups: TokenGroups
    """How many rows each expert has."""

    def take(self, hidden: Tensor) -> Tensor:
        """Rows [rows, h] of ``hidden`` [tokens, h], differentiable."""
        rows: Tensor = _Take.apply(hidden, self)  # type: ignore[no-untyped-call]
        return rows

    def combine(self, rows: Tensor, probs: Tensor | None = None) -> Tensor:
        """Each token's rows summed: [rows, h] -> [tokens, h] in the rows' dtype, differentiable.

        ``probs`` [tokens, topk] weigh them; sums are fp32 at least.
        """
        combined: Tensor = _Combine.apply(rows, probs, self)  # type: ignore[no-untyped-call]
        return combined

    def probs_of_rows(self, probs: Tensor) -> Tensor:
        """The weight [rows] of each row from ``probs`` [tokens, topk]."""
        return probs.reshape(-1).index_select(0, self.order)

    def to_choices(self, of_rows: Tensor) -> Tensor:
        """One number per row [rows] as one per choice [tokens, topk], 0 where a choice has no row."""
        found = of_rows.new_zeros(self.inverse.numel())
        return found.index_copy_(0, self.order, of_rows).view(self.inverse.shape)


def route(indices: Tensor, first: int, experts: int, *, all_local: bool) -> Routing:
    """The routing of ``indices`` [tokens, topk] (int64, the expert of each choice) to the ``experts``
    experts that start at ``first``. Choices outside of them, dropped ones too, get no row.

    ``all_local`` promises that every choice is one of them: then no number is read from the device.
    """
    topk = indices.shape[1]
    keys = indices.reshape(-1)
    if not all_local:
        outside = (keys < first) | (keys >= first + experts)
        keys = keys.masked_fill(outside, first + experts)
    keys, order = _sorted(keys, first, experts)
    bounds = torch.arange(first, first + experts, device=keys.device)
    ends = torch.searchsorted(keys, bounds, right=True).int()
    choices = order.numel()
    rows = choices if all_local or not experts else int(ends[-1])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(choices, device=order.device)
    chosen = None
    if rows < choices:
        chosen = inverse < rows
        inverse = inverse * chosen
        order = order[:rows]
    return Routing(
        order=order,
        tokens=order // topk,
        inverse=inverse.view(indices.shape),
        chosen=None if chosen is None else chosen.view(indices.shape),
        groups=TokenGroups(ends=ends, rows=rows),
    )


def _sorted(keys: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor]:
    """``keys`` in order and where each was, equal keys as they came."""
    if keys.device.type == "cpu" and experts < 2**15 - 1:
        # numpy sorts 16-bit integers by digits, ten times as fast as torch compares 64-bit ones.
        narrow = (keys - first).to(torch.int16)
        order = torch.from_numpy(narrow.numpy().argsort(kind="stable"))
        return keys.index_select(0, order), order
    found = keys.sort(stable=True)
    return found.values, found.indices


def sum_rows(rows: Tensor, routing: Routing, probs: Tensor | None = None) -> Tensor:
    """``Routing.combine`` outside autograd."""
    if not rows.shape[0]:
        return rows.new_zeros(routing.inverse.shape[0], rows.shape[1])
    weights = None
    if probs is not None:
        weights = probs if routing.chosen is None else probs * routing.chosen
    elif routing.chosen is not None:
        weights = routing.chosen.to(rows.dtype)
    fast = rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.bfloat16)
    if fast and (weights is None or weights.dtype is rows.dtype):
        return F.embedding_bag(routing.inverse, rows, mode="sum", per_sample_weights=weights)
    gathered = rows.index_select(0, routing.inverse.reshape(-1)).view(*routing.inverse.shape, -1)
    if weights is None:
        return gathered.sum(1)
    # One product per token: no weighted copy of the gathered rows, and sums as wide as a GEMM's.
    wide = torch.promote_types(weights.dtype, rows.dtype)
    return torch.bmm(weights.to(wide).unsqueeze(1), gathered.to(wide)).squeeze(1).to(rows.dtype)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return hidden.index_select(0, routing.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        return sum_rows(grad_rows.contiguous(), ctx.routing), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor | None, routing: Routing) -> Tensor:
        ctx.routing = routing
        # Without weights the sum is linear in the rows alone: nothing of them is kept.
        ctx.save_for_backward(*(() if probs is None else (rows, probs)))
        return sum_rows(rows, routing, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        routing: Routing = ctx.routing
        grad_rows = grad.index_select(0, routing.tokens)
        # Read once: torch's checkpointing without reentry computes them for one look.
        saved = ctx.saved_tensors
        if not saved:
            return grad_rows, None, None
        rows, probs = saved
        grad_probs = None
        if ctx.needs_input_grad[1]:
            products = torch.linalg.vecdot(grad_rows.to(probs.dtype), rows.to(probs.dtype))
            grad_probs = routing.to_choices(products)
        weights = routing.probs_of_rows(probs).unsqueeze(1).to(grad_rows.dtype)
        return grad_rows.mul_(weights), grad_probs, None


def permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Upstream's ``permute``: rows of ``tokens`` [t, h] grouped by expert, and the sorted choices.

    ``indices`` is [t, topk] or [t]; with ``padded_mode`` it is [experts, capacity], the token of each
    slot. ``num_out_tokens`` keeps the first so many rows (dropped choices sort last).
    """
    if padded_mode:
        return tokens.index_select(0, indices.reshape(-1)), indices
    topk = indices.shape[1] if indices.dim() > 1 else 1
    flat = indices.reshape(-1)
    order = _sorted_by_value(flat)
    if num_out_tokens is not None:
        order = order[: int(num_out_tokens)]
    return _routing_of(order, flat.numel() // topk, topk).take(tokens), order


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: torch.Size | None = None,
) -> Tensor:
    """Upstream's ``unpermute``: rows back where ``permute`` took them from, merged by ``probs``.

    Without ``probs`` every row is a token of its own. With ``padded_mode`` the rows [experts * capacity, h]
    are added up in a tensor of ``restore_shape``.
    """
    if padded_mode:
        assert probs is not None and restore_shape is not None
        # An unfilled slot has weight 0 and some token's number.
        weighted = permuted_tokens * probs.reshape(-1, 1).to(permuted_tokens.dtype)
        return weighted.new_zeros(restore_shape).index_add(0, sorted_indices.reshape(-1), weighted)
    if probs is None:
        routing = _routing_of(sorted_indices, permuted_tokens.shape[0], 1)
    else:
        routing = _routing_of(sorted_indices, *probs.shape)
    return routing.combine(permuted_tokens, probs)


def _sorted_by_value(flat: Tensor) -> Tensor:
    if flat.device.type == "cpu":
        # Dropped choices hold the largest int64; every index of an expert is far below 2**15.
        return torch.from_numpy(flat.clamp(max=2**15 - 1).to(torch.int16).numpy().argsort(kind="stable"))
    return flat.argsort(stable=True)


def _routing_of(order: Tensor, tokens: int, topk: int) -> Routing:
    """A routing for moving rows alone: how many belong to which expert is not known."""
    rows, choices = order.numel(), tokens * topk
    inverse = order.new_zeros(choices)
    inverse[order] = torch.arange(rows, device=order.device)
    chosen = None
    if rows < choices:
        chosen = torch.zeros(choices, dtype=torch.bool, device=order.device)
        chosen[order] = True
    return Routing(
        order=order,
        tokens=order // topk,
        inverse=inverse.view(tokens, topk),
        chosen=None if chosen is None else chosen.view(tokens, topk),
        groups=TokenGroups(ends=torch.full((1,), rows, dtype=torch.int32, device=order.device), rows=rows),
    )
