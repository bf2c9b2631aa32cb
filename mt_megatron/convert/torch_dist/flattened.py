"""Tensors of a distributed optimizer: cut like the model's, and each shard flattened.

Megatron-Core 0.9.0 (``dist_checkpointing/strategies/resharding.py``) stores a tensor of shape [X, Y] that is
cut into shards [x, y] as [X / x, Y / y, x * y], of which processes hold ranges of the last axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_megatron.convert.tensors.shards import Shard
from mt_megatron.convert.torch_dist.metadata import Chunk
from mt_megatron.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Flattened:
    """How a tensor was cut."""

    shape: tuple[int, ...]
    """Of the whole tensor, with the axes of layers and experts."""

    shards: tuple[int, ...]
    """How many there are along each axis."""

    lead: int
    """Axes before the tensor's own, along which each shard has length one."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.shards) or any(
            length % count for length, count in zip(self.shape, self.shards, strict=True)
        ):
            raise CheckpointError(f"a tensor of {self.shape} is not cut into {self.shards} equal pieces")
        if self.shards[: self.lead] != self.shape[: self.lead]:
            raise CheckpointError(f"{self.shards} pieces of {self.shape} hold several layers or experts each")

    def put_together(
        self, chunks: Sequence[Chunk], dtype: torch.dtype, read: Callable[[Chunk], Tensor]
    ) -> tuple[Tensor, int]:
        """The tensor that ``chunks`` (of one layer and expert) hold, and how many of its numbers they do."""
        own, cuts = self.shape[self.lead :], self.shards[self.lead :]
        sizes = tuple(length // count for length, count in zip(own, cuts, strict=True))
        flat = {
            index: torch.empty(torch.Size(sizes).numel(), dtype=dtype)
            for index in itertools.product(*map(range, cuts))
        }
        filled = 0
        for chunk in chunks:
            start = chunk.offsets[-1]
            values = read(chunk).reshape(-1)
            flat[chunk.offsets[self.lead : -1]][start : start + values.numel()] = values
            filled += values.numel()
        whole = torch.empty(own, dtype=dtype)
        for index, shard in flat.items():
            region = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, sizes, strict=True))
            whole[region] = shard.view(sizes)
        return whole, filled


def flat_place(lead: tuple[int, ...], shard: Shard) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of ``shard`` as it is stored flattened, at ``lead`` on the axes before its own."""
    index = tuple(offset // size for offset, size in zip(shard.offsets, shard.sizes, strict=True))
    ones = (1,) * (len(lead) + len(index))
    return (*lead, *index, 0), (*ones, torch.Size(shard.sizes).numel())


def flat_shape(axes: tuple[int, ...], shape: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    """The shape that a tensor of ``axes`` and ``shape`` is stored in when its shards are like ``shard``."""
    counts = tuple(length // size for length, size in zip(shape, shard.sizes, strict=True))
    return (*axes, *counts, torch.Size(shard.sizes).numel())
