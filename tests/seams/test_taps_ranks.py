"""Taps on models that train: nothing computed changes, nothing is told twice, values are the oracle's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks

HERE = "tests.seams.taps_ranks"
TWO: list[dict[str, Any]] = [
    {"tp": 2, "sequence_parallel": True, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    {"pp": 2, "model": "recompute", "hidden_dropout": 0.1, "attention_dropout": 0.1},
    {"pp": 2, "chunks": 2, "cross_entropy_loss_fusion": True},
]
MORE: list[dict[str, Any]] = [
    {"tp": 2, "cross_entropy_loss_fusion": True, "bf16": True},
    {"pp": 2, "chunks": 2, "model": "moe", "schedule": "breadth_first"},
    {"pp": 2, "model": "mtp", "cross_entropy_loss_fusion": True, "schedule": "zb_h1"},
    {"cp": 2, "model": "recompute"},
    {"ep": 2, "model": "moe"},
    {"ep": 2, "model": "grouped"},
]


def test_a_watched_step_is_an_unwatched_one_to_the_bit() -> None:
    check(TWO)


@pytest.mark.daily
def test_so_it_is_in_further_layouts_and_schedules() -> None:
    check(MORE)


def check(cases: list[dict[str, Any]]) -> None:
    """Nothing differs or is left; micro-batches and layers have the whole model's numbers."""
    found = run_ranks(2, f"{HERE}:same_bits", cases)
    for index, case in enumerate(cases):
        ranks = [each[index] for each in found]
        chunks, pp = case.get("chunks", 1), case.get("pp", 1)
        for rank in ranks:
            assert (rank["differ"], rank["left"], rank["more than once"]) == ([], [], []), case
            assert rank["outputs"] > 20 and rank["gradients"] > 20
            assert rank["microbatches"] == [[chunk, each] for chunk in range(chunks) for each in range(4)]
        layers = [{int(path.split(".")[2]) for path in rank["paths"]} for rank in ranks]
        if pp == 1:
            assert layers == [{0, 1}, {0, 1}]
            continue
        assert layers == ([{0, 2}, {1, 3}] if chunks == 2 else [{0}, {1}])
        losses = 3 if case.get("model") == "mtp" else 1
        assert [rank["blocks"] for rank in ranks] == [0, 4 * losses], case


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_values_are_those_of_plain_hooks(recompute: bool, model: str) -> None:
    (found,) = run_ranks(1, f"{HERE}:plain_hooks", recompute, model)
    assert found["differ"] == [] and found["compared"] > 100
    assert found["unseen"] == [] and found["blocked"]


def test_selective_recomputation_and_errors() -> None:
    (found,) = run_ranks(1, f"{HERE}:recomputed_modules")
    counts = found["counts"]
    assert {name: counts[name] for name in ("forward", "gradient", "all False", "all True")} == {
        "forward": 2,
        "gradient": 2,
        "all False": 2,
        "all True": 2,
    }
    assert [counts[f"input {index}"] for index in range(3)] == [2, 2, 2]
    assert counts["failing"] == 1 and found["told"] == ["ValueError: no good"]
    assert found["states"] == [True, False] and found["same"] and found["left"] == []


LOSSES: list[dict[str, Any]] = [
    {"cross_entropy_loss_fusion": True},
    {"cross_entropy_loss_fusion": True, "bf16": True},
    {"cross_entropy_loss_fusion": True, "model": "mtp"},
    {"cross_entropy_loss_fusion": True, "positions": [3, 5], "samples": [1, 2]},
    {"cross_entropy_loss_fusion": False, "positions": [2, 6]},
    {"cross_entropy_loss_fusion": False, "bf16": True},
]


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_the_loss_equal_dense_ones(tp: int) -> None:
    cases = [{**each, "sequence_parallel": tp > 1} for each in LOSSES]
    for rank, results in enumerate(run_ranks(tp, f"{HERE}:loss_of", tp, cases)):
        for case, found in zip(cases, results, strict=True):
            assert found["errors"] == {}, case
            assert found["measured"] == ["entropy", "logits", "losses", "lse", "top"]
            positions = list(range(*case.get("positions", (0, 8))))
            samples = list(range(*case.get("samples", (0, 2))))
            assert (found["positions"], found["samples"]) == (positions, samples)
            # Two micro-batches, and with prediction depths three losses of each.
            times = 6 if case.get("model") == "mtp" else 2
            assert found["tokens"] == times * len(positions) * len(samples)
            assert found["words"] == [[rank * 32 // tp, 32 // tp, 32]]
