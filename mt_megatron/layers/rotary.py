"""Rotary position embedding in three passes over memory, where upstream's expression makes six each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate(t: Tensor, freqs: Tensor, rotary_interleaved: bool = False) -> Tensor:
    """``t`` [s, ..., d] with its first dimensions rotated by the angles ``freqs`` [s, ..., r], r <= d
    (arXiv:2104.09864). Pairs are dimensions i and i + r / 2, or 2 i and 2 i + 1 if interleaved.

    Cosines and sines are rounded to ``t``'s dtype, as upstream does. ``freqs`` gets no gradient.
    """
    rotated: Tensor = _Rotate.apply(t[..., : freqs.shape[-1]], freqs, rotary_interleaved)  # type: ignore[no-untyped-call]
    rest = t[..., freqs.shape[-1] :]
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(freqs)
        ctx.interleaved = interleaved
        first, second = _members(torch.sin(freqs), interleaved)
        return _combined(t, freqs, _joined(-first, second, interleaved), interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (freqs,) = ctx.saved_tensors
        first, second = _members(torch.sin(freqs), ctx.interleaved)
        # The transposed rotation: each member's sine multiplies the other member's gradient.
        return _combined(grad, freqs, _joined(second, -first, ctx.interleaved), ctx.interleaved), None, None


def _combined(t: Tensor, freqs: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """``t * cos + partner of t * sines``."""
    if interleaved:
        partner = t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = torch.roll(t, t.shape[-1] // 2, dims=-1)
    return (t * torch.cos(freqs).to(t.dtype)).addcmul_(partner, sines.to(t.dtype))


def _members(values: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return values[..., ::2], values[..., 1::2]
    first, second = values.chunk(2, dim=-1)
    return first, second


def _joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)
