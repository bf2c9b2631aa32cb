"""Bytes of activations that one micro-batch leaves behind for its backward pass, by recompute mode.

Counts what the local layers of this package keep (``tests/models/test_activation_memory.py`` holds the
formulas to what autograd really saves), with attention that never stores its s x s scores. Korthikanti
et al. (arXiv 2205.05198), section 4, is the published form of the same count for GPT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mt_megatron.models.parameter_tensors import ChunkPlace
from mt_megatron.models.parameters import ModelShape

_FP32 = 4
_INT64 = 8


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What is computed again in the backward pass; the values are Megatron-Core's."""

    granularity: Literal["selective", "full"] | None = None
    """None: nothing; ``selective``: core attention; ``full``: layers."""

    method: Literal["uniform", "block"] | None = None
    """``uniform``: all layers, ``num_layers`` at a time; ``block``: the first ``num_layers`` of a chunk."""

    num_layers: int = 1
    """See ``method``."""

    distribute: bool = False
    """Whether what full recomputation keeps is spread over the tensor-parallel ranks."""

    def recomputed_layers(self, layers: int) -> int:
        """How many of a chunk's ``layers`` run forward twice."""
        if self.granularity != "full":
            return 0
        return layers if self.method == "uniform" else min(self.num_layers, layers)


@dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """What decides how much one micro-batch keeps."""

    sequence: int
    """Tokens of a whole sequence."""

    micro_batch: int
    """Sequences of a micro-batch."""

    element_bytes: int
    """Bytes of one activation: 2 for bf16 and fp16, 4 for fp32."""

    tensor_parallel: int = 1
    context_parallel: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = Recompute()
    fused_activation: bool = False
    """Whether the activation function keeps its input alone (``bias_activation_fusion``)."""

    hidden_dropout: bool = False
    """Whether dropout keeps masks."""

    fused_loss: bool = True
    """Whether output layer and loss are one (``cross_entropy_loss_fusion``)."""

    on_cpu: bool = False
    """Whether dropout masks are as wide as activations, and blocks of logits small."""

    rotary_share: float = 1.0
    """``rotary_percent`` for rotary positions, else 0."""

    deallocate_outputs: bool = True
    """Whether a stage drops its output once it is sent (``deallocate_pipeline_outputs``)."""

    @property
    def mask_bytes(self) -> int:
        """Bytes of one entry of a dropout mask."""
        return self.element_bytes if self.on_cpu else 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that a rank holds where the sequence is divided by context alone."""
        return self.micro_batch * self.sequence // self.context_parallel

    @property
    def norm_tokens(self) -> int:
        """The same in the parts that sequence parallelism divides further."""
        return self.tokens // (self.tensor_parallel if self.sequence_parallel else 1)


def hidden_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """One residual stream of a micro-batch, as it travels between stages."""
    return options.norm_tokens * shape.hidden_size * options.element_bytes


def layer_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """What one transformer layer keeps."""
    outer = 4 * hidden_bytes(shape, options)  # Both norms' inputs and outputs.
    statistics = _FP32 if shape.normalization == "RMSNorm" else 2 * options.element_bytes
    outer += 2 * statistics * options.norm_tokens
    if options.hidden_dropout:
        outer += 2 * options.norm_tokens * shape.hidden_size * options.mask_bytes
    return outer + _attention_bytes(shape, options) + _mlp_bytes(shape, options)


def _attention_bytes(shape: ModelShape, options: ActivationOptions) -> int:
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
        statistics = _FP32 if shape.normalization == "RMSNorm" else 2 * options.element_bytes
        bytes_ += options.tokens * (heads + groups) * statistics
        if rotated and heads != groups:
            bytes_ += options.tokens * query * options.element_bytes
    if not selective:
        bytes_ += options.tokens * heads * _FP32  # The logarithm of each softmax's sum.
    return bytes_


def _mlp_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    ffn = shape.ffn_hidden_size // options.tensor_parallel
    kept = 3 if shape.gated_linear_unit else 2
    if shape.gated_linear_unit and not options.fused_activation:
        kept += 1  # The gate after its activation function.
    return options.tokens * kept * ffn * options.element_bytes


def chunk_bytes(shape: ModelShape, place: ChunkPlace, options: ActivationOptions) -> int:
    """What one micro-batch keeps in one model chunk, the loss apart."""
    hidden = hidden_bytes(shape, options)
    whole = layer_bytes(shape, options)
    recompute = options.recompute
    if recompute.granularity == "full":
        again = recompute.recomputed_layers(place.layers)
        groups = -(-again // recompute.num_layers) if recompute.method == "uniform" else again
        shared = options.tensor_parallel if recompute.distribute else 1
        kept = groups * hidden // shared + (place.layers - again) * whole
    else:
        kept = place.layers * whole
    positions = options.sequence // options.context_parallel
    # The angles of the rotary positions, which all layers share.
    kept += positions * int(shape.kv_channels * options.rotary_share) * _FP32
    if place.first:
        kept += options.tokens * _INT64
        if options.hidden_dropout:
            kept += options.norm_tokens * shape.hidden_size * options.mask_bytes
    if place.last:
        kept += 2 * hidden + (_FP32 if shape.normalization == "RMSNorm" else 0) * options.norm_tokens
    elif not options.deallocate_outputs:
        kept += hidden
    return kept


def backward_workspace(
    shape: ModelShape, place: ChunkPlace, options: ActivationOptions, weight_gradient: int
) -> int:
    """What the backward pass of a chunk's layers needs at its worst moment, beside what is kept then.

    ``weight_gradient`` is the largest one of a layer in bytes, before it is added to the others. Before
    recomputed layers come to their turn, the others behind them have dropped what they kept.
    """
    ffn = shape.ffn_hidden_size // options.tensor_parallel
    wide = 2 if shape.gated_linear_unit and options.fused_activation else 1
    gradients = options.tokens * (wide * ffn + shape.hidden_size) * options.element_bytes + weight_gradient
    recompute = options.recompute
    again = recompute.recomputed_layers(place.layers)
    if not again:
        return gradients
    group = min(recompute.num_layers, again) if recompute.method == "uniform" else 1
    layer = layer_bytes(shape, options)
    dropped = (place.layers - again) * layer
    return max(gradients if dropped else 0, group * layer - dropped + gradients)
