"""Rotary position embedding in three passes over memory, where upstream's expression makes six each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate(t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, factor: float = 1.0) -> Tensor:
    """``t`` [s, ..., d] with its first dimensions rotated by the angles ``freqs`` [s, ..., r], r <= d
    (arXiv:2104.09864). Pairs are dimensions i and i + r / 2, or 2 i and 2 i + 1 if interleaved.

    Cosines and sines are multiplied by ``factor`` and rounded to ``t``'s dtype, as upstream does.
    ``freqs`` gets no gradient.
    """
    rotated: Tensor = _Rotate.apply(  # type: ignore[no-untyped-call]
        t[..., : freqs.shape[-1]], freqs, rotary_interleaved, factor
    )
    rest = t[..., freqs.shape[-1] :]
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, freqs: Tensor, interleaved: bool, factor: float) -> Tensor:
        ctx.save_for_backward(freqs)
        ctx.interleaved, ctx.factor = interleaved, factor
        first, second = _members(_scaled(torch.sin(freqs), factor), interleaved)
        cosines = _scaled(torch.cos(freqs), factor)
        return _combined(t, cosines, _joined(-first, second, interleaved), interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (freqs,) = ctx.saved_tensors
        first, second = _members(_scaled(torch.sin(freqs), ctx.factor), ctx.interleaved)
        cosines = _scaled(torch.cos(freqs), ctx.factor)
        # The transposed rotation: each member's sine multiplies the other member's gradient.
        sines = _joined(second, -first, ctx.interleaved)
        return _combined(grad, cosines, sines, ctx.interleaved), None, None, None


def _scaled(values: Tensor, factor: float) -> Tensor:
    return values if factor == 1.0 else values.mul_(factor)


def _combined(t: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """``t * cosines + partner of t * sines``."""
    if interleaved:
        partner = t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = torch.roll(t, t.shape[-1] // 2, dims=-1)
    return (t * cosines.to(t.dtype)).addcmul_(partner, sines.to(t.dtype))


def _members(values: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return values[..., ::2], values[..., 1::2]
    first, second = values.chunk(2, dim=-1)
    return first, second


def _joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)
