"""Bytes of activations that one micro-batch leaves behind for its backward pass, by recompute mode.

Counts what the local layers of this package keep (``tests/planning/test_memory.py`` holds the
formulas to what autograd really saves), with attention that never stores its s x s scores. Korthikanti
et al. (arXiv 2205.05198), section 4, is the published form of the same count for GPT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mt_megatron.planning.activation_options import ActivationOptions, Recompute
from mt_megatron.planning.expert_memory import expert_rows, feed_forward_bytes
from mt_megatron.planning.parameter_tensors import ChunkPlace
from mt_megatron.planning.parameters import ModelShape

_SHORTEST_OWN = 64
"""Shorter sequences leave our kernel for a CPU out (``layers.attention.core.suits``)."""


def attention_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """What one layer's attention keeps beside its input, which the norm before it keeps."""
    if shape.multi_latent_attention:
        return _latent(shape, options)
    return _grouped(shape, options)


def statistics_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """What a norm keeps for each row besides its input and output."""
    return _FP32 if shape.normalization == "RMSNorm" else 2 * options.element_bytes


def mask_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """Bytes of masks of scores in one layer's attention.

    Kernels keep a window or a mask of documents as numbers of the activations' type, a new one for each
    layer. Over context ranks the scores are computed in tiles: nothing is kept of windows, a mask is shared
    by all layers (``chunk_bytes``), and dropout keeps one byte a score, under causality of half the square.
    """
    if options.context_parallel == 1:
        rows = options.micro_batch if options.documents_mask else int(options.window)
        return rows * options.sequence**2 * options.element_bytes
    if not options.attention_dropout:
        return 0
    held = options.sequence // options.context_parallel
    heads = shape.num_attention_heads // options.tensor_parallel
    return options.micro_batch * heads * held * held * (options.context_parallel + 1) // 2


def _is_masked(options: ActivationOptions) -> bool:
    return options.window or options.documents_mask


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
    elif heads != groups and _is_masked(options) and not (options.on_cpu or selective):
        # Kernels of accelerators take a mask or grouped heads: keys and values are repeated for each head.
        kept = 4 * query + shape.qk_layernorm * packed
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
        bytes_ += mask_bytes(shape, options)
    return bytes_


def pads_values(shape: ModelShape, options: ActivationOptions) -> bool:
    """Whether values are padded to the size of keys: all kernels but ours for a CPU want one size."""
    differ = shape.qk_head_dim + shape.qk_pos_emb_head_dim != shape.v_head_dim
    own = options.on_cpu and options.context_parallel == 1 and options.sequence >= _SHORTEST_OWN
    own = own and not (_is_masked(options) or options.attention_dropout)
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
        bytes_ += options.tokens * heads * _FP32 + mask_bytes(shape, options)
    return bytes_


__all__ = [
    "ActivationOptions",
    "Recompute",
    "backward_workspace",
    "chunk_bytes",
    "hidden_bytes",
    "layer_bytes",
]

_FP32 = 4
_INT64 = 8


def hidden_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """One residual stream of a micro-batch, as it travels between stages."""
    return options.norm_tokens * shape.hidden_size * options.element_bytes


def layer_bytes(shape: ModelShape, options: ActivationOptions, *, mixture: bool = False) -> int:
    """What one transformer layer keeps; ``mixture`` says that its feed-forward network is one of experts."""
    outer = 4 * hidden_bytes(shape, options)  # Both norms' inputs and outputs.
    outer += 2 * statistics_bytes(shape, options) * options.norm_tokens
    if options.hidden_dropout:
        outer += 2 * options.norm_tokens * shape.hidden_size * options.mask_bytes
    return outer + attention_bytes(shape, options) + feed_forward_bytes(shape, options, mixture=mixture)


def chunk_bytes(shape: ModelShape, place: ChunkPlace, options: ActivationOptions) -> int:
    """What one micro-batch keeps in one model chunk, the loss apart."""
    hidden = hidden_bytes(shape, options)
    recompute, kinds = options.recompute, place.kinds(shape)
    again = recompute.recomputed_layers(place.layers)
    sizes = _sizes(shape, options, kinds[again:])
    kept = sum(map(sizes.__getitem__, kinds[again:]))
    shared = options.tensor_parallel if recompute.distribute else 1
    groups = -(-again // recompute.num_layers) if recompute.method == "uniform" else again
    kept += groups * hidden // shared
    kept += _angle_bytes(shape, options)
    if options.documents_mask and (again or options.context_parallel > 1):
        kept += options.micro_batch * options.sequence**2 // options.context_parallel
    if place.first:
        kept += options.tokens * _INT64
        if options.hidden_dropout:
            kept += options.norm_tokens * shape.hidden_size * options.mask_bytes
    if place.last:
        # Before the output layer a BertModel has a dense layer, gelu and a norm.
        kept += (2 + 3 * shape.masked_words) * hidden
        kept += (_FP32 if shape.normalization == "RMSNorm" else 0) * options.norm_tokens
        depths = range(1, place.depths(shape) + 1)
        kept += sum(
            _depth_bytes(shape, options, again=recompute.recomputes_depth(place.layers, depth))
            for depth in depths
        )
    elif not options.deallocate_outputs:
        kept += hidden
    return kept


def _sizes(shape: ModelShape, options: ActivationOptions, kinds: Iterable[bool]) -> dict[bool, int]:
    """What a layer of each of ``kinds`` keeps."""
    return {kind: layer_bytes(shape, options, mixture=kind) for kind in set(kinds)}


def _angle_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """The angles of the rotary positions, which all layers share."""
    positions = options.sequence // options.context_parallel
    if shape.multi_latent_attention:
        return positions * shape.qk_pos_emb_head_dim * _FP32
    return positions * int(shape.kv_channels * options.rotary_share) * _FP32


def _depth_bytes(shape: ModelShape, options: ActivationOptions, *, again: bool) -> int:
    """What one depth of multi-token prediction keeps, its loss apart."""
    hidden = hidden_bytes(shape, options)
    # The embedding, and what goes into the output layer.
    kept = 2 * hidden + options.tokens * _INT64
    if again:
        return kept
    # Both side by side, a layer, and what goes into the last norm; the statistics of three norms.
    kept += 3 * hidden + 3 * statistics_bytes(shape, options) * options.norm_tokens
    return kept + layer_bytes(shape, options, mixture=shape.pattern[-1:] == (1,))


def exchanged_width(shape: ModelShape, options: ActivationOptions) -> int:
    """Numbers of a token's keys and values that context-parallel ranks exchange."""
    if shape.multi_latent_attention:
        return 2 * shape.query_size // options.tensor_parallel  # Values are padded to the size of keys.
    return 2 * shape.num_query_groups * shape.kv_channels // options.tensor_parallel


def exchange_workspace(shape: ModelShape, options: ActivationOptions) -> int:
    """Keys and values of other context-parallel ranks at the worst moment, which is in attention's backward
    pass, and their gradients, which are summed in fp32.

    all_gather: both of the whole sequence. p2p: one shard in use and one on its way, and three of gradients:
    the one just made, and the sum before it where it leaves and where it arrives.
    """
    if options.context_parallel == 1:
        return 0
    shard = options.tokens * exchanged_width(shape, options)
    if options.exchange == "p2p":
        return shard * (2 * options.element_bytes + 3 * _FP32)
    return options.context_parallel * shard * (options.element_bytes + _FP32)


def backward_workspace(
    shape: ModelShape, place: ChunkPlace, options: ActivationOptions, weight_gradient: int
) -> int:
    """What the backward pass of a chunk's layers needs at its worst moment, beside what is kept then.

    ``weight_gradient`` is the largest one of a layer in bytes, before it is added to the others. Before
    recomputed layers come to their turn, the others behind them have dropped what they kept.
    """
    kinds, recompute = place.kinds(shape), options.recompute
    parts = {kind: _made_again(shape, options, kind) for kind in set(kinds)}
    gradients = max((_gradients(shape, options, kind) + size for kind, size in parts.items()), default=0)
    gradients += weight_gradient
    made_again = max(parts.values(), default=0)
    gradients = max(gradients, exchange_workspace(shape, options) + made_again if kinds else 0)
    again = recompute.recomputed_layers(place.layers)
    if not again:
        return gradients
    group = min(recompute.num_layers, again) if recompute.method == "uniform" else 1
    of_kind = _sizes(shape, options, kinds)
    sizes = [of_kind[kind] for kind in kinds]
    dropped = sum(sizes[again:])
    largest = max(sum(sizes[start : start + group]) for start in range(0, again, group))
    return max(gradients if dropped else 0, largest - dropped + gradients)


def _made_again(shape: ModelShape, options: ActivationOptions, mixture: bool) -> int:
    """What parts of one layer that are computed again in the backward pass take then."""
    if not (options.recompute.mla_up_proj or options.recompute.moe_layer):
        return 0
    bare = dataclasses.replace(options.recompute, mla_up_proj=False, moe_layer=False)
    whole = layer_bytes(shape, dataclasses.replace(options, recompute=bare), mixture=mixture)
    return whole - layer_bytes(shape, options, mixture=mixture)


def _gradients(shape: ModelShape, options: ActivationOptions, mixture: bool) -> int:
    """Gradients of the inner activations that are alive at once."""
    wide = 2 if shape.gated_linear_unit and options.fused_activation else 1
    dense = shape.ffn_hidden_size // options.tensor_parallel
    if not mixture:
        return options.tokens * (wide * dense + shape.hidden_size) * options.element_bytes
    width = shape.expert_size // options.tensor_parallel
    rows = expert_rows(shape, options) * (wide * width + shape.hidden_size)
    return (rows + options.tokens * shape.hidden_size) * options.element_bytes
