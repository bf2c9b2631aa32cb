"""Without Transformer Engine a GPT from Megatron-Core's spec for it computes what the local spec's does.

Both run one step in fp32 on the same seeds, dropout in both places. Products, norms and sums are the same
functions in the same order, so the bound of 1e-6 is relative to the largest gradient of each parameter; with
the same order of every sum nothing differs at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.emulators import environment, needs_emulated_musa
from tests.launch import run_ranks

NOTHING: dict[str, Any] = {}
LAYER_NORM = {"normalization": "LayerNorm", "add_bias_linear": True, "layernorm_zero_centered_gamma": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
MIXTURE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
IN_FP8 = {"delayed scaling": 2 * 4, "delayed scaling of experts": 2 * (2 + 2 * 4)}
"""Linears of the layers between the first and the last."""

ALONE: dict[str, Any] = {
    "plain": [NOTHING, NOTHING],
    "layer norm, biases": [NOTHING, LAYER_NORM],
    "norms of queries": [NOTHING, {"qk_layernorm": True}],
    "full recomputation": [NOTHING, RECOMPUTED],
    "selective recomputation": [NOTHING, SELECTIVE],
    "drawn on the host": [NOTHING, {"use_cpu_initialization": True}],
    "delayed scaling": [NOTHING, {"fp8": "hybrid", "num_layers": 4}],
    "delayed scaling of experts": [NOTHING, {"fp8": "hybrid", "num_layers": 4, **MIXTURE}],
    "a window": [NOTHING, {"window_size": [3, 0]}],
}
OF_TWO: dict[str, Any] = {
    "tensor": [{"tp": 2}, LAYER_NORM],
    "sequence": [{"tp": 2}, {"sequence_parallel": True}],
    "pipeline": [{"pp": 2}, NOTHING],
    "context": [{"cp": 2}, NOTHING],
    "data": [NOTHING, RECOMPUTED],
    "expert": [{"ep": 2}, MIXTURE],
}


def require_the_same(found: dict[str, Any], *, bound: float = 1e-6) -> None:
    assert found["class"] == "TELayerNormColumnParallelLinear"
    assert found["names"] == [] and found["weights"] == 0.0
    assert found["losses"] <= bound and found["gradients"] <= bound
    assert found["largest"] > 1e-3, "gradients that could be told from none"


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(1, "tests.layers.te.ranks:all_compared", ALONE)[0]
    return found


@pytest.mark.parametrize("case", ALONE)
def test_in_one_process(alone: dict[str, Any], case: str) -> None:
    require_the_same(alone[case])
    assert alone[case]["in fp8"] == IN_FP8.get(case, 0)


@pytest.fixture(scope="module")
def of_two() -> list[dict[str, Any]]:
    return run_ranks(2, "tests.layers.te.ranks:all_compared", OF_TWO)


@pytest.mark.parametrize("case", OF_TWO)
def test_over_two_ranks(of_two: list[dict[str, Any]], case: str) -> None:
    for found in of_two:
        require_the_same(found[case])


@needs_emulated_musa()
@pytest.mark.daily
def test_on_the_emulated_musa() -> None:
    cases = {name: ALONE[name] for name in ("plain", "layer norm, biases", "full recomputation")}
    for found in run_ranks(1, "tests.layers.te.ranks:all_compared", cases, env=environment())[0].values():
        require_the_same(found)


def test_other_masks_would_be_seen() -> None:
    """The negative control: with masks of another seed the bound is far away."""
    found = run_ranks(1, "tests.layers.te.ranks:compared", NOTHING, NOTHING, True)[0]
    assert found["gradients"] > 1e-2


@pytest.mark.parametrize(
    ("ranks", "layout", "fields"),
    [
        (2, {"tp": 2}, LAYER_NORM),
        pytest.param(2, {"pp": 2}, NOTHING, marks=pytest.mark.daily),
        pytest.param(4, {"tp": 2, "pp": 2}, NOTHING, marks=pytest.mark.daily),
    ],
)
def test_checkpoints_load_either_way(
    ranks: int, layout: dict[str, int], fields: dict[str, Any], tmp_path: Path
) -> None:
    for found in run_ranks(ranks, "tests.layers.te.ranks:exchanged", str(tmp_path), layout, fields):
        for each in found.values():
            assert each["names"] == [] and each["differ"] == [] and each["drawn"] >= 5


EXPERTS: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **MIXTURE}
BIASED = {**EXPERTS, "add_bias_linear": True, "moe_token_dispatcher_type": "allgather"}


@pytest.mark.parametrize(
    ("ranks", "layout", "fields"),
    [
        (2, {"ep": 2}, EXPERTS),
        pytest.param(1, NOTHING, BIASED, marks=pytest.mark.daily),
        pytest.param(2, {"tp": 2}, {**EXPERTS, "sequence_parallel": True}, marks=pytest.mark.daily),
        pytest.param(4, {"tp": 2, "ep": 2}, {**EXPERTS, "sequence_parallel": True}, marks=pytest.mark.daily),
        pytest.param(1, NOTHING, {**EXPERTS, "fp8": "hybrid", "num_layers": 4}, marks=pytest.mark.daily),
    ],
)
def test_grouped_linears_are_experts_one_after_another(
    ranks: int, layout: dict[str, int], fields: dict[str, Any], tmp_path: Path
) -> None:
    for found in run_ranks(ranks, "tests.layers.te.ranks:experts", str(tmp_path), layout, fields):
        assert found["names"] == [] and found["came back"] and found["largest"] > 1e-3
        assert found["losses"]["one after another"] <= 1e-6 and found["gradients"]["grouped linears"] <= 1e-6
        if "fp8" not in fields:  # one product of all experts has scales of all of them
            assert max(found["losses"].values()) <= 1e-6 and max(found["gradients"].values()) <= 1e-5
