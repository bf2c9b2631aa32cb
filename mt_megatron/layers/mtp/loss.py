"""Losses of multi-token prediction: what each depth predicts, which positions count, and their gradient.

With ``labels[i]`` the token after position i, depth k predicts ``labels[i + k]`` at i. It counts where the
model's own prediction counts at i + k, and where i, i + k and the target are in one document.

The loss of a micro-batch is main + factor / D x the sum of the depths' losses, each the mean over its own
counted tokens. The main loss is made outside of the model, by any loss function that adds up tokens'
losses. Its gradient says with what weight: the sum of it over the tokens is what the mean loss is
multiplied with, by the loss scale, the number of micro-batches, or the counted tokens where every token
weighs the same (``calculate_per_token_loss``). The depths' means get the same weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_megatron.backends.dtypes import wide_float
from mt_megatron.layers.attention.packed import are_borders


def shifted(tokens: Tensor, by: int) -> Tensor:
    """``tokens`` [b, s] moved ``by`` positions to the front; zeros move in at the end."""
    result = torch.zeros_like(tokens)
    if by < tokens.shape[1]:
        result[:, : tokens.shape[1] - by] = tokens[:, by:]
    return result


def counted_positions(mask: Tensor, documents: Tensor | None, depth: int) -> Tensor:
    """Weight of every position in the loss of ``depth``, float32 [b, s].

    ``mask`` [b, s] is the main loss's. ``documents`` int64 [b, s] numbers the document of every input
    token; the target of the last position is beyond them, and counts with that position.
    """
    length = mask.shape[1]
    counted = shifted(mask.float(), depth)
    if documents is None or depth >= length:
        return counted
    here = length - depth
    counted[:, :here] *= documents[:, :here] == documents[:, depth:]
    counted[:, : here - 1] *= documents[:, : here - 1] == documents[:, depth + 1 :]
    return counted


def document_numbers(
    labels: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None, packed: Any
) -> Tensor | None:
    """The number of the document of each token, int64 [b, s] like ``labels``; None when nothing tells them.

    Borders are where a packed sequence begins, where a bool mask [b or 1, 1, s, s] hides the token before
    (Megatron's ``reset_attention_mask``), and where positions do not go on (``reset_position_ids``).
    """
    borders = attention_mask if are_borders(attention_mask) else getattr(packed, "cu_seqlens_q", None)
    # One more, for borders that repeat the end.
    flat = torch.zeros(labels.numel() + 1, dtype=torch.bool, device=labels.device)
    starts = flat[:-1].view(labels.shape)
    told = borders is not None
    if borders is not None:
        flat[borders[1:].to(labels.device).long()] = True
    elif attention_mask is not None and attention_mask.dtype is torch.bool and attention_mask.dim() == 4:
        starts[:, 1:] |= torch.diagonal(attention_mask[:, 0], offset=-1, dim1=1, dim2=2)
        told = True
    if position_ids is not None and position_ids.shape == labels.shape:
        # All zeros stand for no positions, from scripts whose model does not look at them.
        known = position_ids.any(dim=1, keepdim=True)
        starts[:, 1:] |= (position_ids[:, 1:] != position_ids[:, :-1] + 1) & known
        told = True
    return starts.cumsum(dim=1) if told else None


class DepthLosses:
    """The losses of all depths for one micro-batch, and how they enter the gradient."""

    def __init__(self, block: Any, mask: Tensor | None, documents: Tensor | None) -> None:
        """``mask`` [b, s] is the main loss's; None: a token counts where its loss gets a gradient."""
        config = block.config
        self.block = block
        self.depths = range(1, len(block.layers) + 1)
        self._mask, self._documents = mask, documents
        self._weight = float(config.mtp_loss_scaling_factor) / len(block.layers)

    def gradients(self, main: Tensor) -> list[Tensor]:
        """The gradient of each depth's per-token losses, float32 [b, s], from ``main``, the main losses'."""
        weight = main.float().sum() * self._weight
        return [weight / counted.sum().clamp(min=1.0) * counted for counted in self._counted(main)]

    def join(self, losses: Tensor, depths: Sequence[Tensor]) -> Tensor:
        """``losses`` [b, s] as they are; backward brings gradients to ``depths``, each [b, s], as well."""
        joined: Tensor = _Join.apply(losses, self, *depths)  # type: ignore[no-untyped-call]
        return joined

    def report(self, main: Tensor, depths: Sequence[Tensor]) -> None:
        """Tell the block how large the losses are."""
        wide = wide_float(main.device)
        rows = [
            torch.stack(((losses * counted).to(wide).sum(), counted.to(wide).sum()))
            for losses, counted in zip(depths, self._counted(main), strict=True)
        ]
        self.block.report(torch.stack(rows))

    def _counted(self, main: Tensor) -> list[Tensor]:
        mask = main != 0 if self._mask is None else self._mask
        return [counted_positions(mask, self._documents, depth) for depth in self.depths]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, joint: DepthLosses, *depths: Tensor) -> Tensor:
        ctx.joint = joint
        ctx.save_for_backward(*depths)
        return losses.view_as(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        joint: DepthLosses = ctx.joint
        joint.report(gradient, ctx.saved_tensors)
        return gradient, None, *joint.gradients(gradient)
