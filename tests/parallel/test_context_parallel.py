"""Chunks of a sequence: complete, balanced, and where upstream's rotary positions expect them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mt_megatron.errors import ConfigError
from mt_megatron.parallel.context_parallel import chunks, part_of_sequence, positions
from tests.launch import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_chunks_cover_the_sequence_and_balance_the_scores(size: int) -> None:
    whole = torch.arange(2 * size * 5)
    parts = [part_of_sequence(whole, 0, rank, size) for rank in range(size)]
    assert sorted(torch.cat(parts).tolist()) == whole.tolist()
    for rank, part in enumerate(parts):
        assert torch.equal(part, positions(rank, size, len(part)))
        assert int((part + 1).sum()) == int((whole + 1).sum()) // size
        assert chunks(rank, size) == (int(part[0]) // 5, int(part[-1]) // 5)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found a sequence of 10 tokens .* multiple of 2 x 2 = 4"):
        part_of_sequence(torch.zeros(2, 10), 1, 0, 2)


def test_the_layout_is_the_one_of_upstreams_rotary_embedding() -> None:
    for found, expected in run_ranks(2, "tests.parallel.test_context_parallel:rotary"):
        assert found == expected


def rotary() -> list[Any]:
    """Upstream's frequencies on this rank, as positions, and ours."""
    import torch.distributed as dist

    from tests.layers.attention import context_parallel_ranks

    context_parallel_ranks.start(2)
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(8, 1.0, rotary_base=10000)
    found = embedding(16)[:, 0, 0, 0]  # the first frequency is 1: the angle is the position
    return [found.tolist(), positions(dist.get_rank(), 2, 8).float().tolist()]
