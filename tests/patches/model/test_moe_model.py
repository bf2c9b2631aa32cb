"""Experts of their own width, shared experts, dense layers among them: against a loop over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.emulators import environment, needs_emulated_musa
from tests.launch import run_ranks
from tests.second_lane import of_lane

RANKS = "tests.patches.model.moe_ranks"
NEAR = 2e-5

ALONE: dict[str, dict[str, Any]] = of_lane(
    {
        "narrow": {"width": 12},
        "wide_not_gated": {"width": 56, "gated": False},
        "as_dense": {},
        "shared": {"width": 12, "shared": 20},
        "shared_not_gated": {"width": 12, "shared": 20, "gated": False},
        "shared_of_dense_width": {"shared": 20},
        "grouped": {"width": 12, "grouped": True},
        "grouped_shared": {"width": 12, "shared": 20, "grouped": True},
        "grouped_not_gated": {"width": 12, "grouped": True, "gated": False},
        "recomputed": {"width": 12, "shared": 20, "fields": {"moe_layer_recompute": True}},
        "overlapped": {"width": 12, "shared": 20, "fields": {"moe_shared_expert_overlap": True}},
        "allgather": {"width": 12, "shared": 20, "fields": {"moe_token_dispatcher_type": "allgather"}},
    },
    *("narrow", "shared_not_gated", "grouped_shared", "recomputed", "overlapped"),
)
TWO: dict[str, dict[str, Any]] = of_lane(
    {
        "tp2": {"tp": 2, "width": 12, "shared": 20},
        "tp2_not_gated": {"tp": 2, "width": 12, "shared": 20, "gated": False},
        "tp2_grouped": {"tp": 2, "width": 12, "shared": 20, "grouped": True},
        "tp2_recomputed": {"tp": 2, "width": 12, "shared": 20, "fields": {"moe_layer_recompute": True}},
        "ep2": {"ep": 2, "width": 12, "shared": 20},
        "ep2_grouped": {"ep": 2, "width": 12, "shared": 20, "grouped": True},
        "ep2_not_gated": {"ep": 2, "width": 12, "gated": False},
    },
    *("tp2_recomputed", "tp2_grouped", "ep2_grouped"),
)
PATTERNS = {1: [0, 1, 0], 2: [0, 0, 1, 1]}
"""Dense layers and layers with experts, by pipeline stages."""

FOUR: dict[str, dict[str, Any]] = of_lane(
    {
        "tp2_ep2": {"tp": 2, "ep": 2, "width": 12, "shared": 20},
        "tp2_ep2_grouped": {"tp": 2, "ep": 2, "width": 12, "shared": 20, "grouped": True},
    }
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    left_out = "moe_shared_expert_intermediate_size"
    folder = str(tmp_path_factory.mktemp("mixed"))
    variants = list(ALONE.values())
    (found,) = run_ranks(1, f"{RANKS}:alone", variants, left_out, PATTERNS[1], folder, timeout=200)
    return dict(found)


@pytest.fixture(scope="module")
def deviations(alone: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    found = {name: [one] for name, one in zip(ALONE, alone["deviations"], strict=True)}
    for size, variants in ((2, TWO), *([(4, FOUR)] if FOUR else [])):
        ranks = run_ranks(size, f"{RANKS}:layer_deviations", list(variants.values()), timeout=200)
        found |= {name: [rank[index] for rank in ranks] for index, name in enumerate(variants)}
    return found


@pytest.mark.parametrize("name", [*ALONE, *TWO, *FOUR])
def test_a_layer_equals_a_loop_over_its_tokens(
    deviations: dict[str, list[dict[str, float]]], name: str
) -> None:
    variant = {**ALONE, **TWO, **FOUR}[name]
    parts = {"output", "input", "router", "experts1", "experts2"}
    parts |= {"shared_experts1", "shared_experts2"} if "shared" in variant else set()
    for rank in deviations[name]:
        assert set(rank) == parts
        assert max(rank.values()) < NEAR, rank


def test_the_comparison_notices_a_shared_expert_that_is_left_out(alone: dict[str, Any]) -> None:
    assert alone["spoiled"]["output"] > 0.01 and alone["spoiled"]["input"] > 0.01


@pytest.mark.parametrize("pp", [1, 2])
def test_dense_layers_stand_where_the_list_says(alone: dict[str, Any], tmp_path: Path, pp: int) -> None:
    pattern = PATTERNS[pp]
    ranks = [alone["mixed"]]
    if pp > 1:
        ranks = run_ranks(pp, f"{RANKS}:mixed_layers", pp, pattern, str(tmp_path), timeout=120)
    kinds = {int(layer): kind for rank in ranks for layer, kind in rank["kinds"].items()}
    assert kinds == {layer: bool(kind) for layer, kind in enumerate(pattern)}
    for rank in ranks:
        assert rank["back"]
        assert rank["block"] == list(rank["kinds"].values())
        for layer, kind in rank["kinds"].items():
            keys = [key for key in rank["keys"] if key.startswith(f"decoder.layers.{layer}.mlp.")]
            assert any("experts" in key for key in keys) == kind


def test_fields_left_unset_change_nothing(alone: dict[str, Any]) -> None:
    """Names, order and weights to the bit. A dense model computes the same to the bit too; one with experts
    has its tokens gathered and summed in another order."""
    found = alone["unset"]
    assert found["dense"] == {"same": True, "loss": 0.0, "gradients": 0.0}
    assert found["experts"]["same"]
    assert found["experts"]["loss"] < 1e-6 and found["experts"]["gradients"] < 1e-5


def test_a_spec_without_experts_for_a_model_with_some_is_an_error(alone: dict[str, Any]) -> None:
    assert "the layer spec has none; expected one made with num_experts=4" in alone["dense_spec"]


@pytest.mark.parametrize("grouped", [True, False])
def test_transformer_engines_linears_get_the_widths(alone: dict[str, Any], grouped: bool) -> None:
    """Against a recording stub, since Transformer Engine runs on CUDA alone."""
    found = alone["stub"][str(grouped)]
    assert found["dense"] == [
        ["TELayerNormColumnParallelLinear", [16, 2 * 40]],
        ["TERowParallelLinear", [40, 16]],
    ]
    assert (found["dense_norm"], found["experts_norm"]) == ("inside", "TENorm")
    shared = [["TEColumnParallelLinear", [16, 2 * 20]], ["TERowParallelLinear", [20, 16]]]
    if grouped:
        experts: list[Any] = [
            ["TEColumnParallelGroupedLinear", [4, 16, 2 * 12]],
            ["TERowParallelGroupedLinear", [4, 12, 16]],
        ]
    else:
        experts = [["TEColumnParallelLinear", [16, 2 * 12]], ["TERowParallelLinear", [12, 16]]] * 4
    assert found["experts"] == experts + shared


@needs_emulated_musa()
def test_a_shared_expert_computes_on_a_stream_of_its_own() -> None:
    """On the emulated musa device, whose streams order nothing: the path, not the overlap."""
    (found,) = run_ranks(1, f"{RANKS}:overlap_on_streams", env=environment(), timeout=90)
    assert found["streams"] and max(found["deviations"].values()) < NEAR
    assert found["told"] == [[[8, 4, 16], "side"], [[8, 4, 16], "main"]]
