"""Rotary position embedding in three passes over memory, where upstream's expression makes six each way.

Cosines and sines of angles are computed once for all layers, queries and keys that get the same tensor of
angles: on a GPU a small kernel takes as long as its launch, and in bf16 they are six of nine.
"""

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


MOST_KEPT = 2**22
"""Angles whose cosines and sines are kept, 8 MB in bf16 each: with longer sequences launches do not count."""

_KEPT = "_mt_megatron_rotation"


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, freqs: Tensor, interleaved: bool, factor: float) -> Tensor:
        ctx.save_for_backward(freqs)
        ctx.interleaved, ctx.factor = interleaved, factor
        return _combined(t, *_tables(freqs, t.dtype, interleaved, factor, back=False), interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (freqs,) = ctx.saved_tensors
        cosines, sines = _tables(freqs, grad.dtype, ctx.interleaved, ctx.factor, back=True)
        return _combined(grad, cosines, sines, ctx.interleaved), None, None, None


def _tables(
    freqs: Tensor, dtype: torch.dtype, interleaved: bool, factor: float, *, back: bool
) -> tuple[Tensor, Tensor]:
    """``_made``, kept with ``freqs`` for as long as these live and are not written to."""
    if freqs.numel() > MOST_KEPT or freqs.is_inference() or _is_captured(freqs.device):
        return _made(freqs, dtype, interleaved, factor, back=back)
    kept: dict[Any, tuple[int, Tensor, Tensor]] = vars(freqs).setdefault(_KEPT, {})
    key = dtype, interleaved, factor, back
    found = kept.get(key)
    if found is None or found[0] != freqs._version:
        made = _made(freqs, dtype, interleaved, factor, back=back)
        found = kept[key] = freqs._version, *made
    return found[1], found[2]


def _is_captured(device: torch.device) -> bool:
    """True while a graph is captured: its tensors hold nothing before it is replayed."""
    module: Any = getattr(torch, device.type, None)
    asked = getattr(module, "is_current_stream_capturing", None)
    # Tensors may say "cuda" where there is none: those of torch's fake mode, for shapes alone.
    return asked is not None and module.is_initialized() and bool(asked())


def _made(
    freqs: Tensor, dtype: torch.dtype, interleaved: bool, factor: float, *, back: bool
) -> tuple[Tensor, Tensor]:
    """Cosines, and sines as they multiply the other member of a pair; ``back``: of the rotation back."""
    first, second = _members(_scaled(torch.sin(freqs), factor), interleaved)
    sines = _joined(second, -first, interleaved) if back else _joined(-first, second, interleaved)
    return _scaled(torch.cos(freqs), factor).to(dtype), sines.to(dtype)


def _scaled(values: Tensor, factor: float) -> Tensor:
    return values if factor == 1.0 else values.mul_(factor)


def _combined(t: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """``t * cosines + partner of t * sines``."""
    if interleaved:
        partner = t.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = torch.roll(t, t.shape[-1] // 2, dims=-1)
    return (t * cosines).addcmul_(partner, sines)


def _members(values: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return values[..., ::2], values[..., 1::2]
    first, second = values.chunk(2, dim=-1)
    return first, second


def _joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)
