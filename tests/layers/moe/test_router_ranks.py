"""Biases equal a hand computation in every layout, and losses of divided tokens equal those of whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import run_ranks
from tests.layers.moe.bias_ranks import BATCH, KINDS, RATE, SEQUENCE, TOPK

RANKS = "tests.layers.moe.bias_ranks:everything"
LAYOUTS = {
    "dp2": [[2, 3], [2, 3]],
    "ep2": [[2, 3], [2, 3]],
    "pp2, one stage without": [[], [3, 4]],
    "pp2, unequal": [[2], [3, 4]],
    "vpp2": [[3], [2, 4]],
}
"""Layers with experts of each rank, counted from 1."""

Found = dict[str, Any]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found: Found = run_ranks(1, RANKS, 1, str(tmp_path_factory.mktemp("one")))[0]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return run_ranks(2, RANKS, 2, str(tmp_path_factory.mktemp("two")), timeout=240)


def close(a: dict[str, list[float]], b: dict[str, list[float]]) -> bool:
    assert a.keys() == b.keys()
    return all(a[n] == pytest.approx(b[n], abs=1e-7) for n in a)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_equal_the_hand_computation(two: list[Found], layout: str) -> None:
    for rank, layers in enumerate(LAYOUTS[layout]):
        found = two[rank][layout]
        assert found["layers"] == layers
        assert close(*found["first"]) and close(*found["third"]), "an applied step moves by sign, once"
        assert close(*found["skipped"]), "a skipped step, and a validation, move nothing"
        assert found["counts zeroed"]
        moves = {abs(move) for bias in found["first"][0].values() for move in bias}
        assert not layers or max(moves) == pytest.approx(RATE), "there is something to see"


@pytest.mark.parametrize("layout", ["dp2", "ep2"])
def test_copies_stay_equal(two: list[Found], layout: str) -> None:
    assert two[0][layout]["first"][0] == two[1][layout]["first"][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_are_in_distributed_checkpoints_in_fp32(two: list[Found], layout: str) -> None:
    for rank, layers in enumerate(LAYOUTS[layout]):
        saved = two[rank][layout]["saved"]
        assert saved["before"] == saved["after"]
        assert saved["dtypes"] == (["torch.float32"] if layers else [])


def test_a_sum_over_all_ranks_is_another_result(two: list[Found]) -> None:
    """Negative control: stages have other layers, whose tokens do not count for this one's."""
    assert not all(close(*found["over world"]["wrong"]) for found in two)


def test_recomputed_layers_count_once(one: Found) -> None:
    found = one["recomputed"]
    assert {sum(counts) for counts in found["counts"]["plain"]} == {found["tokens"]}
    assert found["tokens"] == 2 * BATCH * SEQUENCE * TOPK
    for kind, counts in found["counts"].items():
        assert counts == found["counts"]["plain"], kind


@pytest.mark.parametrize(
    ("layout", "kind"),
    # alltoall_seq is about tensor parallel ranks.
    [(name, kind) for name in ("tp2", "cp2") for kind in KINDS if (name, kind) != ("cp2", "alltoall_seq")],
)
def test_losses_of_divided_tokens_equal_those_of_whole_ones(
    one: Found, two: list[Found], layout: str, kind: str
) -> None:
    for found in two:
        for name in ("weight", "hidden"):
            ours, whole = torch.tensor(found[layout][kind][name]), torch.tensor(one[kind][name])
            assert whole.abs().max() > 1e-5, "there is something to compare"
            torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "aux_loss softmax"])
def test_the_tracked_loss_is_the_whole_one(one: Found, two: list[Found], kind: str) -> None:
    (name,) = one[kind]["tracked"]
    whole = one[kind]["tracked"][name]
    assert name == "load_balancing_loss" and whole[1] > 0.9 and whole[0] == 0
    for layout in ("tp2", "cp2"):
        assert two[0][layout][kind]["tracked"][name] == pytest.approx(whole, rel=1e-5)


def test_kinds_of_loss_differ(one: Found) -> None:
    """Negative control: softmax in place of sigmoid, and a loss per micro-batch in place of per sequence."""
    gradients = [torch.tensor(one[kind]["weight"]) for kind in KINDS if kind != "alltoall_seq"]
    for index, a in enumerate(gradients):
        for b in gradients[index + 1 :]:
            assert not torch.allclose(a, b, rtol=1e-2)


def test_a_loss_per_token_is_scaled_by_the_tokens(one: Found) -> None:
    expected = 3 * SEQUENCE * torch.tensor(one["seq_aux_loss"]["weight"])
    torch.testing.assert_close(torch.tensor(one["per token"]["weight"]), expected, rtol=1e-5, atol=1e-7)


def test_the_tracker_is_reduced_where_a_stage_has_no_experts(two: list[Found]) -> None:
    first, second = (found["tracker"] for found in two)
    assert (first["tracked"], second["tracked"]) == ([], ["load_balancing_loss"])
    assert first["values"] == second["values"]
    losses = first["values"]["load_balancing_loss"]
    # Two micro-batches are added up; a balanced load gives 1 each.
    assert losses[:2] == [0, 0] and min(losses[2:]) > 1.5


@pytest.mark.soak
def test_biases_of_four_ranks_equal_the_hand_computation(tmp_path: Path) -> None:
    layers = {"tp2 dp2": [[2, 3]] * 4, "pp2 ep2": [[2], [2], [3, 4], [3, 4]]}
    for rank, found in enumerate(
        run_ranks(4, "tests.layers.moe.bias_ranks:combined", str(tmp_path), timeout=300)
    ):
        for name, expected in layers.items():
            assert found[name]["layers"] == expected[rank]
            assert (
                close(*found[name]["first"])
                and close(*found[name]["third"])
                and close(*found[name]["skipped"])
            )
            assert found[name]["saved"]["before"] == found[name]["saved"]["after"]
