"""Bytes that the output layer and the cross-entropy take on the last pipeline stage."""

from __future__ import annotations

from mt_megatron.models.activation_memory import ActivationOptions
from mt_megatron.models.parameters import ModelShape


def loss_kept_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """What one micro-batch's loss keeps for its backward pass: the softmax in fp32, the targets, which
    of them are on this rank, and which count."""
    return options.tokens * (4 * shape.vocab_size // options.tensor_parallel + 8 + 1 + 4)


def loss_workspace(shape: ModelShape, options: ActivationOptions) -> int:
    """What the loss needs for a moment beside it: the logits, and in the backward pass their gradient."""
    return options.tokens * shape.vocab_size // options.tensor_parallel * options.element_bytes
