"""Shards of a tensor at a tensor-parallel size, and a shard cut from a tensor's parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.models.weights import TensorRow


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int = 0
    """The tensor-parallel rank that it is for."""


def shards_of(
    name: str, row: TensorRow, shape: tuple[int, ...], axis: int | None, tensor: int
) -> list[Shard]:
    """The shards of a padded ``shape`` at tensor-parallel size ``tensor``, divided along ``axis``.

    Of stacked tensors each is divided by itself, as Megatron does with gate and up: a rank then has
    several shards. Raises ``ConfigError`` when it does not come out even.
    """
    stacked = len(row.sources) if row.packing == "stacked" else 1
    # Where columns are divided, what is stacked stays together in every shard.
    groups = stacked if axis in (None, 0) else 1
    split = 1 if axis is None else tensor
    along = axis or 0
    if not shape:
        return [Shard(offsets=(), sizes=())]
    if shape[along] % (groups * split):
        raise ConfigError(
            f"{name} has {shape[along]} {'rows' if along == 0 else 'columns'}; expected a multiple of "
            f"{groups * split} for --tensor-model-parallel-size {tensor}. Change it"
        )
    length = shape[along] // (groups * split)
    found = []
    for group, rank in itertools.product(range(groups), range(split)):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[along], sizes[along] = (group * split + rank) * length, length
        found.append(Shard(offsets=tuple(offsets), sizes=tuple(sizes), rank=rank))
    return found


def take(parts: Sequence[Tensor], shard: Shard) -> Tensor:
    """``shard`` of the tensor whose ``parts`` lie below each other, contiguous: a view of one of them
    where it can be. Rows behind the last part are zero (padding of a vocabulary)."""
    found = blocks(parts, shard)
    return found[0] if len(found) == 1 else torch.cat(found)


def blocks(parts: Sequence[Tensor], shard: Shard) -> list[Tensor]:
    """``take`` as contiguous tensors that lie below each other."""
    if not shard.sizes:
        return [parts[0].contiguous()]
    first, last = shard.offsets[0], shard.offsets[0] + shard.sizes[0]
    columns = tuple(slice(o, o + n) for o, n in zip(shard.offsets[1:], shard.sizes[1:], strict=True))
    found, start = [], 0
    for part in parts:
        stop = start + part.shape[0]
        if start < last and first < stop:
            region = (slice(max(first, start) - start, min(last, stop) - start), *columns)
            found.append(part[region].contiguous())
        start = stop
    missing = last - max(first, start)
    if missing > 0:
        found.append(parts[0].new_zeros((missing, *shard.sizes[1:])))
    return found
