"""Output layer and vocabulary-parallel cross-entropy in one, a block of tokens at a time.

Logits exist for one block only, in the layer's dtype, and in fp32 for a few rows of it. Where the
gradient of every token's loss is announced (``seams.loss_gradient``) both gradients of the output
layer are computed while the block's softmax is at hand: three matrix products in all, and the weight
gradient goes straight into ``weight.main_grad``. Otherwise backward computes the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_megatron.layers import linear
from mt_megatron.layers.loss.cross_entropy_blocks import Blocks
from mt_megatron.layers.loss.cross_entropy_panels import Panels


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    announced: Tensor | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T`` against ``labels``, in nats, float32 [s, b].

    ``hidden`` is [s, b, h], or this rank's [s / tp, b, h] under ``sequence_parallel``; ``weight`` this
    rank's rows of the vocabulary, [v / tp, h]; ``labels`` int64 [s, b], ids of the whole vocabulary.
    Ids from ``vocab_size`` on pad the vocabulary: they have no share of the softmax. None: none do.
    Softmax and sums are fp32. ``announced`` float32 [s, b] is the gradient that backward is going to
    bring; it is used for a parameter that has a ``main_grad`` or needs no gradient. What backward
    brings is compared with it, and a difference is computed and added, so that gradients are right
    either way. ``gradient_accumulation_fusion`` adds to ``main_grad`` without an announcement as well.
    """
    training = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if announced is not None and (not training or not _takes_gradient_early(weight)):
        announced = None
    losses: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, vocab_size, announced, sequence_parallel, gradient_accumulation_fusion
    )
    return losses


def _takes_gradient_early(weight: Tensor) -> bool:
    if not weight.requires_grad:
        return True
    return weight.is_leaf and getattr(weight, "main_grad", None) is not None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int | None,
        announced: Tensor | None,
        sequence_parallel: bool,
        gradient_accumulation_fusion: bool,
    ) -> Tensor:
        ctx.dtype = linear._autocast_dtype(hidden)
        ctx.vocab_size = vocab_size
        ctx.sequence_parallel = sequence_parallel
        ctx.into_main_grad = gradient_accumulation_fusion or announced is not None
        # What was done in forward counts for one backward; a second one finds nothing done.
        ctx.announced = announced
        linear._keep_weight(ctx, weight)
        with linear._autocast_off(hidden):
            hidden = linear._cast(hidden, ctx.dtype).contiguous()
            total = linear._gather(hidden)[0] if sequence_parallel else hidden
            blocks = _blocks(total, weight, labels, vocab_size, ctx.dtype)
            if announced is None:
                losses, lse = blocks.losses()
                ctx.save_for_backward(hidden, labels, lse)
            else:
                needs_hidden, needs_weight = ctx.needs_input_grad[:2]
                gradient = torch.empty_like(total) if needs_hidden or blocks.group is not None else None
                losses, lse = blocks.losses(
                    announced.reshape(-1), gradient, linear._main_grad(weight) if needs_weight else None
                )
                reduced = _reduced(gradient, hidden, sequence_parallel, blocks.group)
                ctx.save_for_backward(hidden, labels, lse, reduced)
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels, lse = ctx.saved_tensors[:3]
        weight, done = linear._kept_weight(ctx), ctx.announced
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = grad_weight = None
        if done is not None:
            ctx.announced = None
            grad_hidden = ctx.saved_tensors[3]
            if needs_weight:
                _mark_as_added(weight)
            if torch.equal(grad_losses, done):
                return grad_hidden, grad_weight, None, None, None, None, None
            grad_losses = grad_losses - done
        with linear._autocast_off(hidden):
            total = linear._gather(hidden)[0] if ctx.sequence_parallel else hidden
            blocks = _blocks(total, weight, labels, ctx.vocab_size, ctx.dtype)
            gradient = torch.empty_like(total) if needs_hidden or blocks.group is not None else None
            into = None
            if needs_weight:
                into = _accumulator(weight, ctx.into_main_grad)
            blocks.gradients(lse, grad_losses.reshape(-1), gradient, into)
            reduced = _reduced(gradient, hidden, ctx.sequence_parallel, blocks.group)
        if into is not None and ctx.into_main_grad:
            _mark_as_added(weight)
        elif into is not None:
            grad_weight = into.to(weight.dtype)
        if grad_hidden is not None and reduced is not None:
            reduced = reduced + grad_hidden
        return reduced, grad_weight, None, None, None, None, None


def _mark_as_added(weight: Tensor) -> None:
    """Tell DDP's hook, which runs without a gradient too: a stand-in would be as large as the weight."""
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True


def _accumulator(weight: Tensor, fused: bool) -> Tensor:
    if fused:
        return linear._main_grad(weight)
    # Blocks add up in fp32, however narrow the gradient is in the end.
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def _blocks(
    total: Tensor, weight: Tensor, labels: Tensor, vocab_size: int | None, dtype: torch.dtype | None
) -> Blocks | Panels:
    group = parallel_state.get_tensor_model_parallel_group()
    shared = group is not None and group.size() > 1
    place: dict[str, Any] = {
        "first": weight.shape[0] * group.rank() if shared else 0,
        "vocab_size": vocab_size,
        "group": group if shared else None,
    }
    recipe = linear._recipe(weight)
    hidden, weight, labels = linear._flat(total), linear._cast(weight, dtype), labels.reshape(-1)
    if hidden.device.type == "cpu" and hidden.dtype is torch.float32 and recipe is None:
        return Panels(hidden, weight, labels, **place)
    return Blocks(hidden, weight, labels, recipe=recipe, **place)


def _reduced(gradient: Tensor | None, hidden: Tensor, sequence_parallel: bool, group: Any) -> Tensor | None:
    """The input gradient, summed over the ranks that share the vocabulary."""
    if gradient is None or group is None:
        return gradient
    if sequence_parallel:
        shard = torch.empty_like(hidden)
        linear._Collective("reduce_scatter", shard, linear._reduce_scatter, gradient).wait()
        return shard
    linear._Collective("all_reduce", gradient, dist.all_reduce).wait()
    return gradient
