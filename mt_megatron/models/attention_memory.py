"""Bytes that the attention of one layer keeps for its backward pass: grouped-query and latent attention."""

from __future__ import annotations

from mt_megatron.models.activation_options import ActivationOptions
from mt_megatron.models.parameters import ModelShape

_FP32 = 4
_SHORTEST_OWN = 64
"""Shorter sequences leave our kernel for a CPU out (``layers.attention.causal.suits``)."""


def attention_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """What one layer's attention keeps beside its input, which the norm before it keeps."""
    if shape.multi_latent_attention:
        return _latent(shape, options)
    return _grouped(shape, options)


def statistics_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """What a norm keeps for each row besides its input and output."""
    return _FP32 if shape.normalization == "RMSNorm" else 2 * options.element_bytes


def _grouped(shape: ModelShape, options: ActivationOptions) -> int:
    heads, groups = (
        shape.num_attention_heads // options.tensor_parallel,
        shape.num_query_groups // options.tensor_parallel,
    )
    query, keys = heads * shape.kv_channels, groups * shape.kv_channels
    packed = query + 2 * keys
    rotated = options.rotary_share > 0
    apart = rotated or heads != groups or shape.qk_layernorm
    selective = options.recompute.granularity == "selective"
    if options.context_parallel > 1 and not selective:
        # The exchange copies keys and values into one tensor; the packed projection may go.
        kept = query + 2 * keys + query
        packed_stays = (shape.qk_layernorm) * packed
        kept += packed_stays
    else:
        # Values are a view of the packed projection, which therefore stays as a whole.
        kept = packed + query + (query if apart else 0) + (keys if rotated or shape.qk_layernorm else 0)
    bytes_ = options.tokens * kept * options.element_bytes
    if shape.qk_layernorm:
        bytes_ += options.tokens * (heads + groups) * statistics_bytes(shape, options)
        if rotated and heads != groups:
            bytes_ += options.tokens * query * options.element_bytes
    if not selective:
        bytes_ += options.tokens * heads * _FP32  # The logarithm of each softmax's sum.
    return bytes_


def pads_values(shape: ModelShape, options: ActivationOptions) -> bool:
    """Whether values are padded to the size of keys: all kernels but ours for a CPU want one size."""
    differ = shape.qk_head_dim + shape.qk_pos_emb_head_dim != shape.v_head_dim
    own = options.on_cpu and options.context_parallel == 1 and options.sequence >= _SHORTEST_OWN
    return shape.multi_latent_attention and differ and not own


def _latent(shape: ModelShape, options: ActivationOptions) -> int:
    heads = shape.num_attention_heads // options.tensor_parallel
    query, output = shape.query_size // options.tensor_parallel, heads * shape.v_head_dim
    recompute = options.recompute
    # Both compressed streams before and after their norms; beside one lies the shared key's part.
    narrow = 2 * shape.kv_lora_rank + shape.qk_pos_emb_head_dim + 2 * (shape.q_lora_rank or 0)
    bytes_ = options.norm_tokens * narrow * options.element_bytes
    norms = 1 if shape.q_lora_rank is None else 2
    bytes_ += options.norm_tokens * statistics_bytes(shape, options) * norms
    wide = output  # What goes into the output projection.
    padded = pads_values(shape, options) and recompute.granularity != "selective"
    if padded:
        wide += 2 * query  # Padded values and their weighted sums, both copies.
    if not recompute.mla_up_proj:
        wide += 2 * query + (0 if padded else output)
    bytes_ += options.tokens * wide * options.element_bytes
    if recompute.granularity != "selective":
        bytes_ += options.tokens * heads * _FP32
    return bytes_
