"""Bytes that a feed-forward network keeps for its backward pass: a dense one, and a mixture of experts."""

from __future__ import annotations

import math

from mt_megatron.planning.activation_options import ActivationOptions
from mt_megatron.planning.parameters import ModelShape

_FP32 = 4
_INT64 = 8


def feed_forward_bytes(shape: ModelShape, options: ActivationOptions, *, mixture: bool) -> int:
    """What one layer's feed-forward network keeps beside its input, which the norm before it keeps."""
    if not mixture:
        return int(options.tokens * _inner_bytes(shape, options, shape.ffn_hidden_size))
    if options.recompute.moe_layer:
        return 0
    kept = router_bytes(shape, options) + expert_bytes(shape, options)
    if shape.moe_shared_expert_intermediate_size is not None:
        width = shape.moe_shared_expert_intermediate_size
        kept += int(options.tokens * _inner_bytes(shape, options, width))
    return kept


def _inner_bytes(shape: ModelShape, options: ActivationOptions, width: int) -> int:
    """One token's inner activations of a feed-forward network of ``width``."""
    kept = 3 if shape.gated_linear_unit else 2
    if shape.gated_linear_unit and not options.fused_activation:
        kept += 1  # The gate after its activation function.
    return kept * (width // options.tensor_parallel) * options.element_bytes


def router_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """What the router keeps: its scores, its choices, and where each of them goes."""
    experts = shape.num_moe_experts or 0
    width = options.router_bytes or options.element_bytes
    rows = options.norm_tokens
    scores = width + (_FP32 if options.aux_loss else 0)
    return rows * (experts * scores + shape.moe_router_topk * (width + 2 * _FP32 + _INT64))


def expert_rows(shape: ModelShape, options: ActivationOptions) -> int:
    """Rows that the experts of the busiest rank compute, all of its tensor-parallel group's together."""
    return math.ceil(options.tokens * shape.moe_router_topk * options.expert_rows)


def expert_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """What dispatch, experts and combination keep (``layers.moe.token_dispatch``, ``layers.moe.experts``)."""
    rows, hidden = expert_rows(shape, options), shape.hidden_size * options.element_bytes
    width = shape.expert_size // options.tensor_parallel * options.element_bytes
    # Every row's place in the three orders that it is looked up by.
    kept = rows * 3 * _INT64
    gathers = options.expert_dispatcher == "allgather"
    hands_over = shape.moe_grouped_gemm and not options.pad_to_capacity
    if hands_over and (gathers or not options.experts_span_ranks):
        # Experts read the layer's input, gathered from all ranks, and keep one product's output.
        tokens = options.tokens * options.expert_parallel if options.experts_span_ranks else 0
        return kept + tokens * hidden + rows * 2 * width
    if gathers and options.experts_span_ranks:
        kept += options.tokens * options.expert_parallel * hidden
    inner = 2 * width if shape.moe_grouped_gemm else _inner_bytes(shape, options, shape.expert_size)
    # What comes back is kept in the order of the tokens, for the gradient of their weights.
    returned = rows if gathers else options.norm_tokens * shape.moe_router_topk
    if options.pad_to_capacity:
        # Once more with the weights: summing slots up keeps what it sums.
        returned = 2 * rows
    return kept + rows * (hidden + inner) + returned * hidden
