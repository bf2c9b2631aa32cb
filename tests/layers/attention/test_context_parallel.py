"""Attention over a context-parallel group equals one process's; what it cannot do is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks

RANKS = "tests.layers.attention.context_parallel_ranks:"


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """What each of two ranks found."""
    return run_ranks(2, RANKS + "everything", 2, timeout=240)


@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process_and_leaks_are_noticed(world: int, request: pytest.FixtureRequest) -> None:
    if world == 2:
        ranks = request.getfixturevalue("ranks")
    else:
        ranks = run_ranks(world, RANKS + "only_against_one_process", world, timeout=240)
    found = [rank["against_one_process"] for rank in ranks]
    cases = {name: [max(each) for each in zip(*(f[name] for f in found), strict=True)] for name in found[0]}
    leaks = {name: values for name, values in cases.items() if name.startswith("leak")}
    assert len(leaks) == 3 and len(cases) == 3 + 2 * 13
    for name, values in cases.items():
        if name in leaks:
            assert min(values) > 1e-2, (name, values)
        else:
            assert max(values) < (2e-2 if "bf16" in name else 3e-6), (name, values)


def test_later_tokens_change_nothing_before_them(ranks: Ranks) -> None:
    assert [rank["later_tokens"] for rank in ranks] == [{"before": False, "at": True}] * 2


def test_dropout_differs_between_ranks_and_comes_back_in_recomputation(ranks: Ranks) -> None:
    both = [rank["dropout"] for rank in ranks]
    for found in both:
        assert found["values"] == [0.0, pytest.approx(1 / 0.75, abs=1e-3)]
        assert 0.70 < found["share"] < 0.80
        assert found["moves"] and not found["default_moves"]
        assert found["recompute"] and found["off_in_eval"]
    # What Megatron-LM saves of one rank must do for the others.
    assert both[0]["tracker"] == both[1]["tracker"]
    same = [a == b for a, b in zip(*(found["pattern"] for found in both), strict=True)]
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


def test_what_cannot_be_right_is_refused(ranks: Ranks) -> None:
    for found in (rank["refusals"] for rank in ranks):
        assert found.keys() == EXPECTED.keys()
        for name, text in EXPECTED.items():
            assert text in found[name], (name, found[name])


def test_the_causal_path_uses_fused_kernels_and_one_collective_each_way(ranks: Ranks) -> None:
    for found in (rank["what_runs"] for rank in ranks):
        assert found["all_gather"]["kernels"] == found["p2p"]["kernels"] == ["cpu"]
        assert found["all_gather"]["collectives"] == ["all_gather", "all_gather", "reduce_scatter"]
        assert found["p2p"]["collectives"] == ["ring"] * 4  # keys and values twice, gradients home
        for exchange in ("all_gather", "p2p"):
            # The queries, the own keys and values, the output: nothing grows with other ranks' tokens.
            assert found[exchange]["largest kept"] == 2 * found["own keys"]
