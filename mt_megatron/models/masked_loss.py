"""The loss of a micro-batch from the losses of its tokens, and that loss's gradient before it is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mt_megatron.seams.schedule import microbatches_of_this_step


def masked_loss(
    model: torch.nn.Module, loss_mask: Tensor, counted_tokens: Tensor, losses: Tensor
) -> tuple[Any, ...]:
    """What ``LlamaFamily.loss`` promises of ``losses`` float32 [b, s]: a mean or a sum, and a report."""
    from megatron.core.utils import get_model_config

    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum()
    report = {"loss": total.detach(), "tokens": tokens}
    config = get_model_config(model)
    if config.calculate_per_token_loss:
        return total, tokens.to(torch.int), report
    return total / _denominator(config, counted_tokens), report


def loss_gradient(model: torch.nn.Module, loss_mask: Tensor, counted_tokens: Tensor) -> Tensor | None:
    """What backward is going to bring for each token of ``masked_loss``, float32 [b, s].

    To the bit, since the factors are applied as autograd does: the loss scale, the number of
    micro-batches that the schedule divides by, the counted tokens, the mask. None where there will
    be no backward, and outside of a step.
    """
    from megatron.core.utils import get_model_config

    microbatches = microbatches_of_this_step()
    if microbatches is None or not torch.is_grad_enabled():
        return None
    config = get_model_config(model)
    gradient: Tensor = torch.ones((), device=loss_mask.device)
    if config.grad_scale_func is not None:
        gradient = config.grad_scale_func(gradient).detach().reshape(()).float()
    if not config.calculate_per_token_loss:
        gradient = gradient / microbatches
        gradient = gradient / _denominator(config, counted_tokens)
    return gradient * loss_mask.float()


def _denominator(config: Any, counted_tokens: Tensor) -> Tensor:
    # A micro-batch without a single counted token has loss 0, not 0/0.
    tokens: Tensor = counted_tokens.clamp(min=1.0) / config.context_parallel_size
    return tokens
