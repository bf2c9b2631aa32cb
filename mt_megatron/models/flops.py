"""Floating-point operations of a dense decoder per token: forward, training, and with recomputation.

Two per multiply-add of every matrix product; attention over the whole s x s square (the usual
convention, causal kernels do about half of that part); a backward pass is two forward passes. The
same definition as ``ModelFamily.flops``, which MFU is measured by.
"""

from __future__ import annotations

from dataclasses import dataclass

from mt_megatron.models.activation_memory import Recompute
from mt_megatron.models.parameters import ModelShape


@dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """Floating-point operations of one forward pass for one token."""

    layer_matrices: int
    """The linears of one transformer layer."""

    layer_attention: int
    """Scores and weighted values of one layer."""

    head: int
    """The output layer."""

    layers: int
    """Transformer layers."""

    @property
    def layer(self) -> int:
        """One transformer layer."""
        return self.layer_matrices + self.layer_attention

    @property
    def total(self) -> int:
        """The whole model."""
        return self.layers * self.layer + self.head

    @property
    def training(self) -> int:
        """Forward and backward pass, nothing computed twice: what MFU counts."""
        return 3 * self.total


def forward_flops(shape: ModelShape, sequence: int) -> ForwardFlops:
    """For a dense model and sequences of ``sequence`` tokens; ``shape.vocab_size`` is the padded size."""
    query = shape.num_attention_heads * shape.kv_channels
    keys = 2 * shape.num_query_groups * shape.kv_channels
    ffn = shape.ffn_hidden_size * (3 if shape.gated_linear_unit else 2)
    matrices = shape.hidden_size * (query + keys) + query * shape.hidden_size + shape.hidden_size * ffn
    return ForwardFlops(
        layer_matrices=2 * matrices,
        layer_attention=4 * sequence * query,
        head=2 * shape.hidden_size * shape.vocab_size,
        layers=shape.num_layers,
    )


def executed_flops(flops: ForwardFlops, recompute: Recompute, *, chunk_layers: int) -> int:
    """Operations per token that a training step really executes, recomputed ones included.

    ``chunk_layers`` is the number of layers of one model chunk, which ``block`` counts from.
    """
    again = 0
    if recompute.granularity == "full":
        share = recompute.recomputed_layers(chunk_layers) / chunk_layers
        again = round(flops.layers * share * flops.layer)
    elif recompute.granularity == "selective":
        again = flops.layers * flops.layer_attention
    return flops.training + again
