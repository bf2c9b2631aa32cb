"""Bytes that the output layer and the cross-entropy take on the last pipeline stage."""

from __future__ import annotations

from mt_megatron.models.activation_memory import ActivationOptions, hidden_bytes
from mt_megatron.models.parameters import ModelShape

_FP32 = 4
_INT64 = 8
_BLOCK_ON_CPU = 96 << 20
_BLOCK = 1 << 30
"""Most bytes of logits at a time when output layer and loss are one (``loss.cross_entropy_blocks``)."""
_PANEL_OF_LOGITS = 4 * 2048 * 192
_PANEL_OF_PRODUCT = 4 << 20
"""In fp32 on a CPU most bytes of logits, and of a weight gradient, before they go where they belong
(``layers.loss.cross_entropy_panels``, ``seams.onednn``)."""


def loss_kept_bytes(shape: ModelShape, options: ActivationOptions) -> int:
    """What one micro-batch's loss keeps for its backward pass, and those of multi-token prediction.

    Fused with the output layer: the gradient of its input, the targets, one sum and one weight per token.
    Else: the softmax of all tokens in fp32, the targets, which of them are on this rank, the weights.
    """
    losses = 1 + (shape.mtp_num_layers or 0)
    if options.fused_loss:
        return losses * (hidden_bytes(shape, options) + options.tokens * (_INT64 + 2 * _FP32))
    softmax = _FP32 * shape.vocab_size // options.tensor_parallel
    return losses * options.tokens * (softmax + _INT64 + 1 + _FP32)


def loss_workspace(shape: ModelShape, options: ActivationOptions, weight_gradient: int) -> int:
    """What the loss needs at its worst moment beside what it keeps; ``weight_gradient`` is the output
    layer's, in bytes.

    Fused: in forward one block of logits (in fp32 on a CPU a part of another product beside it), and under
    sequence parallelism the input's gradient before it is scattered; in backward a stand-in for the weight
    gradient, which is in its buffer already. Else: in forward the logits that are no fp32, in backward their
    gradient and the weight gradient.
    """
    logits = options.tokens * shape.vocab_size // options.tensor_parallel
    if options.fused_loss:
        width = _FP32 if options.element_bytes == _FP32 else options.element_bytes + _FP32
        if options.on_cpu and options.element_bytes < _FP32 and options.tensor_parallel == 1:
            # Few rows at a time are widened; the weight gradient's product transposes the block.
            width = 2 * options.element_bytes
        limit = _BLOCK_ON_CPU if options.on_cpu else _BLOCK
        block = min(limit, logits * width)
        if options.on_cpu and options.element_bytes == _FP32:
            # The weight gradient's product is of hidden states times their tokens' factors.
            scaled = options.tokens * shape.hidden_size * _FP32 * block // (logits * width)
            # The hidden states' gradient is made of a panel that the product lays out anew, twice.
            panels = 2 * min(block, _PANEL_OF_LOGITS)
            block += max(panels, min(weight_gradient, _PANEL_OF_PRODUCT) + scaled)
        gradient = options.tokens * shape.hidden_size * options.element_bytes
        whole = gradient - hidden_bytes(shape, options) if options.sequence_parallel else 0
        return max(block + whole, weight_gradient)
    if options.element_bytes == _FP32:
        return weight_gradient
    return max(logits * options.element_bytes, weight_gradient - 2 * logits)
