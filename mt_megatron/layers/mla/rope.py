"""MLA's queries and keys from their two parts: one without position, one that is rotated.

Rotated pairs are dimensions 2 i and 2 i + 1, DeepSeek's interleaved order, in the parameters and in
what is computed. Angles are [s, b or 1, r / 2] in fp32 (or fp64), rotation is computed in that dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotated_queries(query: Tensor, angles: Tensor, factor: float = 1.0) -> Tensor:
    """``query`` [s, b, heads, d + r] with its last r dimensions rotated and multiplied by ``factor``."""
    rotated: Tensor = _Queries.apply(query, angles, factor)  # type: ignore[no-untyped-call]
    return rotated


def keys_of(key: Tensor, shared: Tensor, angles: Tensor, factor: float = 1.0) -> Tensor:
    """[s, b, heads, d + r]: each head's ``key`` [s, b, heads, d], and ``shared`` [s, b, r], the same for
    all heads, rotated and multiplied by ``factor``."""
    keys: Tensor = _Keys.apply(key, shared, angles, factor)  # type: ignore[no-untyped-call]
    return keys


class _Queries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, angles: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.factor = factor
        return _turned_queries(query, angles, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (angles,) = ctx.saved_tensors
        return _turned_queries(grad, -angles, ctx.factor), None, None


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, shared: Tensor, angles: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.factor = factor
        size = key.size(-1)
        keys = key.new_empty(*key.shape[:-1], size + shared.size(-1))
        keys[..., :size] = key
        keys[..., size:] = _turned(shared, angles, factor).unsqueeze(2)
        return keys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (angles,) = ctx.saved_tensors
        size = grad.size(-1) - 2 * angles.size(-1)
        # Turning is linear: once for the sum over the heads.
        shared = _turned(grad[..., size:].sum(2), -angles, ctx.factor)
        return grad[..., :size], shared, None, None


def _turned_queries(query: Tensor, angles: Tensor, factor: float) -> Tensor:
    size = query.size(-1) - 2 * angles.size(-1)
    turned = query.clone(memory_format=torch.contiguous_format)
    turned[..., size:] = _turned(query[..., size:], angles.unsqueeze(2), factor)
    return turned


def _turned(t: Tensor, angles: Tensor, factor: float) -> Tensor:
    """A copy of ``t`` [..., r] whose pairs are turned by ``angles`` [..., r / 2]."""
    wide = t.to(angles.dtype)
    if wide.device.type == "cpu" and type(wide) is Tensor:
        # One pass; numbers that stand two apart cost several times as much.
        turns = torch.polar(torch.full_like(angles, factor), angles)
        pairs = torch.view_as_complex(wide.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).to(t.dtype)
    return _turned_by_parts(wide, angles, factor).to(t.dtype)


def _turned_by_parts(t: Tensor, angles: Tensor, factor: float) -> Tensor:
    """The same for devices that may not have complex numbers."""
    first, second = t.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = factor * torch.cos(angles), factor * torch.sin(angles)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
