"""Bytes that the output layer and the cross-entropy take on the last pipeline stage."""

from __future__ import annotations

from mt_megatron.models.activation_memory import ActivationOptions
from mt_megatron.models.parameters import ModelShape


def loss_kept_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """What one micro-batch's loss keeps for its backward pass: the softmax in fp32, the targets, which
    of them are on this rank, and which count."""
    return options.tokens * (4 * shape.vocab_size // options.tensor_parallel + 8 + 1 + 4)


def loss_workspace(shape: ModelShape, options: ActivationOptions, weight_gradient: int) -> int:
    """What the loss needs at its worst moment beside it: in forward the logits that are no fp32, in
    backward their gradient and the output layer's ``weight_gradient`` (bytes)."""
    if options.element_bytes == 4:
        return weight_gradient
    logits = options.tokens * shape.vocab_size // options.tensor_parallel
    return max(logits * options.element_bytes, weight_gradient - 2 * logits)
