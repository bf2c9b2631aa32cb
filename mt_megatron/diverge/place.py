"""Where a rank's output of a module lies in the output for the whole model and the global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Place = tuple[tuple[int, ...], tuple[Tensor | None, ...]]
"""Shape of the whole, and for every dimension its indices that the part covers (None: all)."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What this rank holds of a micro-batch."""

    sequence: int
    """Tokens of a whole sequence."""

    batch: int
    """Samples of the global batch."""

    positions: Tensor
    """int64: the tokens of a sequence that this context-parallel rank holds, in its order."""

    samples: Tensor
    """int64: which samples of the global batch the micro-batch is made of."""

    tp_rank: int
    tp_size: int


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a module's output is laid out, by what the module is."""

    batch_first: bool = False
    """[b, s, h] instead of Megatron's [s, b, h]."""

    per_sample: bool = True
    """Whether the batch dimension counts samples; rotary angles are the same for all."""

    split: str | None = None
    """What tensor parallelism splits: ``last`` dimension, ``heads`` (dimension 2 of 4), ``gated`` (the last,
    holding this rank's share of the gate and then of the other half); None when every rank has all of it."""


def kind_of(name: str, module: torch.nn.Module, *, gated: bool) -> Kind:
    """The kind of the module called ``name``; ``gated`` says whether the MLP is."""
    classes = {each.__name__.removeprefix("TE") for each in type(module).__mro__}
    last = name.rpartition(".")[2]
    if last in ("word_embeddings", "position_embeddings", "tokentype_embeddings"):
        return Kind(batch_first=not getattr(module, "reduce_scatter_embeddings", False))
    if last == "rotary_pos_emb":
        return Kind(per_sample=False)
    if last in ("q_layernorm", "k_layernorm"):
        # Of heads [s, b, heads, d]; that of a latent, [s, b, rank], every rank has whole.
        return Kind(split="heads")
    if last == "core_attention":
        return Kind(split="last")
    if {"ColumnParallelLinear", "LayerNormColumnParallelLinear"} & classes and not getattr(
        module, "gather_output", False
    ):
        return Kind(split="gated" if gated and last == "linear_fc1" else "last")
    return Kind()


def sequence_first(kind: Kind, tensor: Tensor) -> Tensor:
    """``tensor`` as a view in Megatron's [s, b, h]: whether embeddings are depends on the layout."""
    return tensor.transpose(0, 1) if kind.batch_first and tensor.dim() == 3 else tensor


def place(kind: Kind, tensor: Tensor, frame: Frame) -> Place | None:
    """Where ``tensor``, sequence first unless it is [b, s], lies; None when its shape is not known."""
    if tensor.dim() not in (2, 3, 4):
        return None
    sequence, batch = (1, 0) if tensor.dim() == 2 else (0, 1)
    shape = list(tensor.shape)
    index: list[Tensor | None] = [None] * tensor.dim()
    found = _tokens(tensor.shape[sequence], frame)
    samples = _samples(tensor.shape[batch], frame, kind.per_sample)
    if found is None or samples is None:
        return None
    (shape[sequence], index[sequence]), (shape[batch], index[batch]) = found, samples
    least = 4 if kind.split == "heads" else 3
    if kind.split is not None and frame.tp_size > 1 and tensor.dim() >= least:
        dim = 2 if kind.split == "heads" else tensor.dim() - 1
        shape[dim], index[dim] = _features(tensor.shape[dim], kind.split, frame)
    return tuple(shape), tuple(index)


def _tokens(length: int, frame: Frame) -> tuple[int, Tensor | None] | None:
    held = len(frame.positions)
    if length == held:
        return frame.sequence, None if held == frame.sequence else frame.positions
    if length * frame.tp_size == held:
        # Sequence parallelism: each tensor-parallel rank has a slice of what its context rank holds.
        start = length * frame.tp_rank
        return frame.sequence, frame.positions[start : start + length]
    return (length, None) if length in (1, frame.sequence) else None


def _samples(count: int, frame: Frame, per_sample: bool) -> tuple[int, Tensor | None] | None:
    if per_sample and count == len(frame.samples):
        return frame.batch, None if count == frame.batch else frame.samples
    return (1, None) if count == 1 else None


def _features(width: int, split: str, frame: Frame) -> tuple[int, Tensor]:
    whole = width * frame.tp_size
    if split == "gated":
        half = width // 2
        part = torch.arange(half) + half * frame.tp_rank
        return whole, torch.cat([part, part + whole // 2])
    return whole, torch.arange(width) + width * frame.tp_rank
