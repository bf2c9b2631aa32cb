"""Silent defects of Megatron-Core 0.9.0: dropout under sequence parallelism, the cached loss mask."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.second_lane import of_lane

RANKS = "tests.patches.errata.dropout_ranks:everything"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, dict[str, Any]] = of_lane(
    {
        "tensor": {"tp": 2},
        "sequence": {"tp": 2, "sequence_parallel": True},
        "sequence, full recomputation": {"tp": 2, "sequence_parallel": True, **FULL},
        "sequence, selective recomputation": {
            "tp": 2,
            "sequence_parallel": True,
            "recompute_granularity": "selective",
        },
        "sequence, attention alone": {
            "tp": 2,
            "sequence_parallel": True,
            "hidden_dropout": 0.0,
        },
        "tensor, full recomputation": {"tp": 2, **FULL},
        "context": {"cp": 2},
        "context, full recomputation": {"cp": 2, **FULL},
        "prediction": {"tp": 2, "mtp": True, "sequence_parallel": True},
        "prediction, full recomputation": {"tp": 2, "mtp": True, "sequence_parallel": True, **FULL},
    },
    *(
        "tensor",
        "tensor, full recomputation",
        "sequence",
        "sequence, selective recomputation",
        "context",
        "prediction",
        "prediction, full recomputation",
    ),
)
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks() -> Found:
    return run_ranks(2, RANKS, CASES, [], timeout=240)


def draws(found: dict[str, Any]) -> list[int]:
    """All draws of the forward passes of a case."""
    return [each for microbatch in found["forward"] for each in microbatch]


@pytest.mark.parametrize("case", CASES)
def test_no_mask_is_drawn_twice(ranks: Found, case: str) -> None:
    """Between layers, attention and hidden dropout, and micro-batches."""
    for rank in ranks:
        seen = draws(rank[case])
        assert len(seen) >= 4 and len(set(seen)) == len(seen)


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("sequence", "prediction"))])
def test_ranks_with_other_tokens_draw_other_masks(ranks: Found, case: str) -> None:
    first, second = (set(draws(rank[case])) for rank in ranks)
    assert not first & second


@pytest.mark.parametrize("case", ["tensor", "tensor, full recomputation"])
def test_ranks_with_equal_tokens_draw_equal_masks_of_hidden_states(ranks: Found, case: str) -> None:
    """The embeddings' and two of each of two layers are equal; attention's, of other heads, are not."""
    first, second = (rank[case]["forward"] for rank in ranks)
    for ours, theirs in zip(first, second, strict=True):
        assert [a == b for a, b in zip(ours, theirs, strict=True)].count(True) == 1 + 2 * 2
        assert [a == b for a, b in zip(ours, theirs, strict=True)].count(False) == 2


def test_ranks_with_other_positions_draw_other_masks_of_attention(ranks: Found) -> None:
    first, second = (set(draws(rank["context"])) for rank in ranks)
    assert len(first - second) >= 2 * 2


@pytest.mark.parametrize("case", [name for name in CASES if "recomputation" in name])
def test_recomputation_draws_the_masks_again(ranks: Found, case: str) -> None:
    """Recomputed layers draw what they drew, and gradients are those of a run without recomputation."""
    plain = case.split(",")[0]
    for rank in ranks:
        for forward, backward in zip(rank[case]["forward"], rank[case]["backward"], strict=True):
            assert backward and set(backward) <= set(forward)
            assert len(set(backward)) == len(backward)
        assert rank[case]["forward"] == rank[plain]["forward"]
        assert rank[case]["gradients"] == rank[plain]["gradients"]


@pytest.mark.parametrize("case", CASES)
def test_masks_come_back_from_saved_states(ranks: Found, case: str) -> None:
    assert all(rank[case]["resumed"] for rank in ranks)


def test_without_the_mend_ranks_share_masks() -> None:
    """Negative control: upstream's defect is what these tests see."""
    cases = {"sequence": CASES["sequence"]}
    first, second = (set(draws(rank["sequence"])) for rank in run_ranks(2, RANKS, cases, ["errata"]))
    assert first & second


def tracker_draws(without: list[str]) -> dict[str, list[float]]:
    """Numbers drawn in nested forks, and those of one stream drawn in a row."""
    import torch

    import mt_megatron
    from tests.patches.errata.dropout_ranks import features_without

    mt_megatron.patch("cpu", features=features_without(without))
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    def started() -> CudaRNGStatesTracker:
        tracker = CudaRNGStatesTracker()
        tracker.add("a", 11)
        tracker.add("b", 12)
        return tracker

    def row(name: str) -> list[float]:
        tracker = started()
        with tracker.fork(name):
            return [float(torch.rand(())) for _ in range(6)]

    found: dict[str, list[float]] = {"a": [], "b": [], "a in a row": row("a"), "b in a row": row("b")}
    tracker = started()

    def draw(name: str) -> None:
        found[name].append(float(torch.rand(())))

    outside = torch.get_rng_state()
    with tracker.fork("a"):
        draw("a")
        with tracker.fork("a"):
            draw("a")
            with tracker.fork("b"):
                draw("b")
                with tracker.fork("a"):
                    draw("a")
                draw("b")
            draw("a")
        draw("a")
    with tracker.fork("a"):
        draw("a")
    with tracker.fork("b"):
        found["b"] += [float(torch.rand(())) for _ in range(4)]
    assert torch.equal(outside, torch.get_rng_state())
    return found


def test_nested_forks_go_on_with_their_streams() -> None:
    [found] = run_ranks(1, "tests.patches.errata.test_wrong_results:tracker_draws", [])
    assert found["a"] == found["a in a row"] and found["b"] == found["b in a row"]


def test_upstreams_nested_forks_repeat() -> None:
    """Negative control."""
    [found] = run_ranks(1, "tests.patches.errata.test_wrong_results:tracker_draws", ["errata"])
    assert found["a"] != found["a in a row"] and len(set(found["a"])) < 6
