"""Attention over a context-parallel group equals one process's; what it cannot do is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mt_megatron.errors import ConfigError
from mt_megatron.seams.context_parallel import chunks, part_of_sequence, positions
from tests.launch import run_ranks

RANKS = "tests.layers.context_parallel_ranks:"


@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process_and_leaks_are_noticed(world: int) -> None:
    ranks = run_ranks(world, RANKS + "against_one_process", world, timeout=240)
    cases = {name: [max(each) for each in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}
    leaks = {name: values for name, values in cases.items() if name.startswith("leak")}
    assert len(leaks) == 3 and len(cases) == 3 + 2 * 13
    for name, values in cases.items():
        if name in leaks:
            assert min(values) > 1e-2, (name, values)
        else:
            assert max(values) < (2e-2 if "bf16" in name else 3e-6), (name, values)


def test_later_tokens_change_nothing_before_them() -> None:
    assert run_ranks(2, RANKS + "later_tokens", 2) == [{"before": False, "at": True}] * 2


def test_dropout_differs_between_ranks_and_comes_back_in_recomputation() -> None:
    ranks = run_ranks(2, RANKS + "dropout", 2)
    for found in ranks:
        assert found["values"] == [0.0, pytest.approx(1 / 0.75, abs=1e-3)]
        assert 0.70 < found["share"] < 0.80
        assert found["moves"] and not found["default_moves"]
        assert found["recompute"] and found["off_in_eval"]
    # What Megatron-LM saves of one rank must do for the others.
    assert ranks[0]["tracker"] == ranks[1]["tracker"]
    same = [a == b for a, b in zip(*(found["pattern"] for found in ranks), strict=True)]
    # Of independent patterns 0.75 * 0.75 + 0.25 * 0.25 agree.
    assert 0.55 < sum(same) / len(same) < 0.70


EXPECTED = {
    "other size": "context_parallel_size is 4 and Megatron's context parallel groups have 2 rank",
    "no size": "context_parallel_size is 1 and Megatron's context parallel groups have 2 rank",
    "cross": "with cross attention; expected self attention",
    "exchange": "cp_comm_type is 'a2a'; expected one of all_gather, p2p",
    "exchange per layer": "expected one of all_gather, p2p, the same for all layers",
    "packed": "packed sequences reached an attention",
    "rows": "expected torch.bool, True where attending is forbidden, broadcastable to (2, 4, 16, 32)",
    "odd": "found 3 tokens on this rank; expected an even number",
    "cache": "a key-value cache reached",
    "step": "a key-value cache reached",
    "packed sequences": "context_parallel_size is 2 and packed sequences were given; expected None",
    "prompt": "context_parallel_size is 2 and a key-value cache was given; expected None",
}


def test_what_cannot_be_right_is_refused() -> None:
    for found in run_ranks(2, RANKS + "refusals", 2):
        assert found.keys() == EXPECTED.keys()
        for name, text in EXPECTED.items():
            assert text in found[name], (name, found[name])


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
    for found, expected in run_ranks(2, "tests.layers.test_context_parallel:rotary"):
        assert found == expected


def rotary() -> list[Any]:
    """Upstream's frequencies on this rank, as positions, and ours."""
    import torch.distributed as dist

    from tests.layers import context_parallel_ranks

    context_parallel_ranks.start(2)
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(8, 1.0, rotary_base=10000)
    found = embedding(16)[:, 0, 0, 0]  # the first frequency is 1: the angle is the position
    return [found.tolist(), positions(dist.get_rank(), 2, 8).float().tolist()]
