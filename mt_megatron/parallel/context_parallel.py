"""Which tokens of a sequence a context-parallel rank holds.

A sequence of s tokens is cut into ``2 * size`` equal chunks and rank r holds chunk r and chunk
``2 * size - 1 - r``: under a causal mask every rank then has the same number of scores to compute.
It is the layout of Megatron-Core's ``get_pos_emb_on_this_cp_rank`` and of Megatron-LM's batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mt_megatron.errors import ConfigError


def chunks(rank: int, size: int) -> tuple[int, int]:
    """The two of ``2 * size`` chunks that ``rank`` holds, in the order it holds them."""
    return rank, 2 * size - 1 - rank


def positions(rank: int, size: int, length: int, device: torch.device | None = None) -> Tensor:
    """int64 [length]: where in the whole sequence each of the ``length`` tokens of ``rank`` stands."""
    half = length // 2
    within = torch.arange(half, device=device)
    return torch.cat([within + chunk * half for chunk in chunks(rank, size)])


def part_of_sequence(whole: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """What ``rank`` holds of ``whole``, whose dimension ``dim`` is the sequence; a copy.

    Raises ConfigError when that dimension is not a multiple of ``2 * size``.
    """
    length = whole.size(dim)
    if length % (2 * size):
        raise ConfigError(
            f"found a sequence of {length} tokens for context_parallel_size {size}; expected a multiple of "
            f"2 x {size} = {2 * size}: each process holds two chunks of it. Change the sequence length"
        )
    half = length // (2 * size)
    return torch.cat([whole.narrow(dim, chunk * half, half) for chunk in chunks(rank, size)], dim=dim)
