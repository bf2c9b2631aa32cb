"""The judge's side of a parity run: whole tensors from pieces, and the bounds they must keep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How far a layout may be from the reference."""

    gradient: float
    """Largest difference within a parameter's step-1 gradient over that gradient's largest element."""

    loss: float
    """Relative, every step."""

    norm: float
    """Relative, gradient norm of every step."""

    weight: float
    """Absolute, final weights."""


FP32 = Bounds(gradient=1e-5, loss=1e-6, norm=1e-6, weight=1e-4)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One layout's run."""

    losses: list[float]
    norms: list[float]
    clipped: int
    """Steps whose gradient norm was above the clipping threshold."""

    layer_forwards: int
    """How often rank 0 ran a layer forward, recomputation included."""

    attention_forwards: int
    """The same for core attention."""

    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    unequal_copies: list[str]
    """Parameters of which two ranks hold copies that are not equal to the bit."""


def read_record(folder: Path, results: list[dict[str, Any]]) -> Record:
    """Join the ranks' results into whole tensors; every element must be on some rank."""
    first = results[0]
    agreed = ("losses", "norms", "clipped")
    if any(result[name] != first[name] for result in results for name in agreed):
        raise AssertionError(f"ranks disagree about losses or norms: {results}")
    ranks = [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(len(results))]
    unequal: list[str] = []
    return Record(
        **first,
        gradients=_whole([rank["gradients"] for rank in ranks], unequal),
        weights=_whole([rank["weights"] for rank in ranks], unequal),
        unequal_copies=unequal,
    )


def _whole(
    ranks: list[list[tuple[str, list[int], list[int], torch.Tensor]]], unequal: list[str]
) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for key, shape, offset, piece in (entry for rank in ranks for entry in rank):
        target = whole.setdefault(key, torch.full(shape, torch.nan))
        assert list(target.shape) == shape, f"{key}: ranks disagree about its shape"
        region = target[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))]
        piece = piece.float()
        both = ~region.isnan() & ~piece.isnan()
        if not torch.equal(region[both], piece[both]):
            unequal.append(key)
        region.copy_(torch.where(piece.isnan(), region, piece))
    for key, tensor in whole.items():
        assert not tensor.isnan().any(), f"{key}: {int(tensor.isnan().sum())} elements are on no rank"
    return whole


def check(reference: Record, candidate: Record, bounds: Bounds) -> dict[str, float]:
    """Raise ``AssertionError`` where ``candidate`` leaves ``bounds``; else the largest deviations."""
    assert not candidate.unequal_copies, f"ranks hold different copies: {candidate.unequal_copies}"
    gradient = _largest(reference.gradients, candidate.gradients, relative=True)
    loss = max(_relative(a, b) for a, b in zip(reference.losses, candidate.losses, strict=True))
    norm = max(_relative(a, b) for a, b in zip(reference.norms, candidate.norms, strict=True))
    weight = _largest(reference.weights, candidate.weights, relative=False)
    found = {"gradient": gradient[0], "loss": loss, "norm": norm, "weight": weight[0]}
    where = {"gradient": gradient[1], "weight": weight[1]}
    for name, value in found.items():
        allowed = getattr(bounds, name)
        assert value <= allowed, (
            f"{name} deviates by {value:.3g}, allowed {allowed:.3g} {where.get(name, '')}; all: {found}"
        )
    return found


def _largest(
    reference: dict[str, torch.Tensor], candidate: dict[str, torch.Tensor], *, relative: bool
) -> tuple[float, str]:
    assert reference.keys() == candidate.keys(), sorted(reference.keys() ^ candidate.keys())
    found = []
    for key, expected in reference.items():
        # Equal layers are stacked along dimension 0: each layer's parameter is judged by itself.
        stacked = key.startswith("decoder.layers.") and not key.split(".")[2].isdigit()
        for index, (a, b) in enumerate(
            zip(expected, candidate[key], strict=True) if stacked else [(expected, candidate[key])]
        ):
            scale = a.abs().max().item() if relative else 1.0
            assert scale > 0, f"{key} [{index}]: the reference gradient is zero, which compares nothing"
            found.append(((a - b).abs().max().item() / scale, f"at {key} [{index}]"))
    return max(found)


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(a)
