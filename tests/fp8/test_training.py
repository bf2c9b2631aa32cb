"""Training under the recipes: counts, scales that ranks share, layouts, recomputation, resume."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mt_megatron.fp8.recipe import PRESETS
from tests.fp8.cases import MIXTURE, ROUNDS
from tests.launch import run_ranks
from tests.second_lane import DAILY, of_lane

CASES = "tests.fp8.cases"
TP2 = "--tensor-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
EP2 = f"{MIXTURE} --expert-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SAVED = ("blockwise", "mxfp8")
TOGETHER = ("delayed", "tensorwise", "blockwise")
RECIPES = of_lane(PRESETS, "delayed", "blockwise", "nvfp4")

LINEARS = 4 * 4
"""Of the model: QKV, projection and two of the MLP in four layers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[str, Any]:
    layouts = {"bf16": "", **{name: f"--fp8-recipe {name}" for name in RECIPES}}
    layouts |= {
        "recomputed": f"--fp8-recipe blockwise {RECOMPUTE}",
        "saved in FP8": "--fp8-recipe blockwise --fp8-save-activations",
        "mixture": f"--fp8-recipe tensorwise {MIXTURE}",
    }
    if DAILY:
        layouts |= {
            "mixture one by one": f"--fp8-recipe tensorwise {MIXTURE} --no-moe-grouped-gemm",
            "mixture recomputed": f"--fp8-recipe tensorwise {MIXTURE} {RECOMPUTE}",
        }
    return dict(run_ranks(1, f"{CASES}:trained", folder, layouts, 6 if DAILY else 3, timeout=900)[0])


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_follows_bf16(alone: dict[str, Any], name: str) -> None:
    losses, expected = alone[name]["losses"], alone["bf16"]["losses"]
    assert all(map(math.isfinite, losses)) and losses != expected
    assert losses[-1] == pytest.approx(expected[-1], rel=0.02), (losses, expected)


@pytest.mark.parametrize("name", RECIPES)
def test_each_operand_is_cast_once_for_each_layout(alone: dict[str, Any], name: str) -> None:
    recipe, found = PRESETS[name], alone[name]
    counts, rounds = found["counts"], found["rounds"]
    assert rounds == ROUNDS
    weights = 1 if recipe.shares_weight_codes else 2
    assert counts["weight.1"] + counts.get("weight.0", 0) == weights * LINEARS, "once a step"
    for kind, shared in (("input", recipe.shares_input_codes), ("grad", recipe.shares_grad_codes)):
        layouts = 1 if shared or not recipe.wgrad.quantised else 2
        assert counts.get(f"{kind}.1", 0) + counts.get(f"{kind}.0", 0) == layouts * LINEARS * rounds, kind


@pytest.mark.parametrize(
    ("name", "same"),
    [("recomputed", "blockwise"), ("saved in FP8", "blockwise"), ("mixture recomputed", "mixture")],
)
def test_what_changes_no_numbers(alone: dict[str, Any], name: str, same: str) -> None:
    assert alone[name]["losses"] == alone[same]["losses"]
    assert alone[name]["norms"] == alone[same]["norms"]


def test_grouped_and_single_experts_agree(alone: dict[str, Any]) -> None:
    grouped, single = alone["mixture"]["losses"], alone["mixture one by one"]["losses"]
    assert grouped == pytest.approx(single, rel=2e-3)


@pytest.fixture(scope="module")
def pairs(folder: str, alone: dict[str, Any]) -> list[dict[str, Any]]:
    layouts = {
        **{f"{name} sp": f"--fp8-recipe {name} {SP}" for name in PRESETS},
        # 32 rows on each rank: whole blocks of one recipe and a part of one of the other.
        **{f"{name} saved": f"--fp8-recipe {name} {SP} --fp8-save-activations" for name in SAVED},
        "delayed tp2": f"--fp8-recipe delayed --fp8-amax-history-len 4 {TP2}",
        "delayed dp2": "--fp8-recipe delayed --fp8-amax-history-len 4",
        "delayed tp2 alone": f"--fp8-recipe delayed --fp8-amax-history-len 4 {TP2} --tp-only-amax-red",
        "delayed dp2 alone": "--fp8-recipe delayed --fp8-amax-history-len 4 --tp-only-amax-red",
        "delayed ep2": f"--fp8-recipe delayed --fp8-amax-history-len 4 {EP2}",
        "blockwise pp2": f"--fp8-recipe blockwise {PP2} {RECOMPUTE}",
        "zero1": f"--fp8-recipe rowwise {ZERO1}",
    }
    for name in TOGETHER:
        layouts |= {
            f"{name} experts pp2": f"--fp8-recipe {name} {MIXTURE} {PP2}",
            f"{name} experts pp2 recomputed": f"--fp8-recipe {name} {MIXTURE} {PP2} {RECOMPUTE}",
        }
    for name in ("tensorwise", "delayed"):
        layouts |= {
            f"{name} zero1": f"--fp8-recipe {name} {ZERO1}",
            f"{name} gathered": f"--fp8-recipe {name} {ZERO1} --fp8-param-gather",
        }
    layouts = of_lane(
        layouts,
        *("blockwise sp", "blockwise saved", "delayed tp2", "delayed zero1", "delayed gathered"),
        "blockwise pp2",
    )
    return run_ranks(2, f"{CASES}:trained", folder, layouts, 4 if DAILY else 3, timeout=900)


@pytest.mark.parametrize("name", SAVED)
def test_inputs_saved_in_fp8_are_gathered_alike(pairs: list[dict[str, Any]], name: str) -> None:
    for found in pairs:
        for what in ("losses", "norms"):
            assert found[f"{name} saved"][what] == found[f"{name} sp"][what]


def test_ranks_with_other_samples_may_have_scales_of_their_own(pairs: list[dict[str, Any]]) -> None:
    """--tp-only-amax-red: magnitudes are shared among ranks with the same samples alone."""
    first, second = (found["delayed dp2 alone"] for found in pairs)
    assert first["counts"].get("amax_reductions", 0) == 0 and first["losses"] == second["losses"]
    assert first["rows"] != second["rows"]
    slots = first["slots"]
    weights = [[row[2], row[1 + slots + 4 : 1 + slots + 8]] for row in first["rows"].values()]
    assert weights == [[row[2], row[1 + slots + 4 : 1 + slots + 8]] for row in second["rows"].values()]
    first, second = (found["delayed tp2 alone"] for found in pairs)
    assert first["counts"]["amax_reductions"] == 1 and first["rows"] == second["rows"]


@pytest.mark.parametrize("layout", ["delayed tp2", "delayed dp2", "delayed ep2"])
def test_shared_scales_are_equal_to_the_bit_on_all_ranks(pairs: list[dict[str, Any]], layout: str) -> None:
    first, second = (found[layout]["rows"] for found in pairs)
    assert first == second and len(first) >= 12
    histories = [row[1 + 3 :] for row in first.values()]
    assert all(any(values) for values in histories), "magnitudes were noted"
    assert pairs[0][layout]["counts"]["amax_reductions"] == 1, "one reduction a step"


@pytest.mark.parametrize("name", PRESETS)
def test_inputs_are_gathered_in_fp8(pairs: list[dict[str, Any]], name: str, alone: dict[str, Any]) -> None:
    found, recipe = pairs[0][f"{name} sp"], PRESETS[name]
    assert found["losses"] == pytest.approx(alone[name]["losses"][: len(found["losses"])], rel=5e-3)
    counts, rounds = found["counts"], found["rounds"]
    columns = LINEARS // 2 * rounds
    # 32 tokens of two sequences on each rank: 128 is no divisor, so wgrad's codes cannot be put together.
    both = 2 if recipe.wgrad.quantised and recipe.wgrad.b.block[1] != 128 else 1
    assert counts["gathered_codes"] == both * columns
    as_it_is = name in ("blockwise", "rowwise_gw_hp")
    assert counts.get("gathered_bf16", 0) == (columns if as_it_is else 0)
    per_gather = {"tensorwise": 1, "rowwise": 1, "nvfp4": 2}
    assert counts.get("gather_reductions", 0) == per_gather.get(name, 0) * columns


@pytest.mark.parametrize("layout", ["blockwise pp2", "zero1"])
def test_other_layouts_train(pairs: list[dict[str, Any]], layout: str) -> None:
    losses = pairs[-1][layout]["losses"]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def test_pipeline_stages_change_nothing(pairs: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    found = pairs[0]["blockwise pp2"]["losses"]
    assert found == pytest.approx(alone["blockwise"]["losses"][: len(found)], rel=1e-6)


def recomputed_alike(plain: dict[str, Any], recomputed: dict[str, Any]) -> None:
    """Both trained on several micro-batches, one of them with recomputation, with the same numbers."""
    assert plain["rounds"] == recomputed["rounds"] > 1
    assert all(map(math.isfinite, plain["losses"])) and plain["losses"][-1] < plain["losses"][0]
    for what in ("losses", "norms", "rows"):
        assert plain[what] == recomputed[what], what
    inputs = [found["counts"]["input.1"] for found in (plain, recomputed)]
    assert inputs[1] > 1.5 * inputs[0], "inputs are cast anew where they are computed anew"


@pytest.mark.parametrize("name", TOGETHER)
def test_recomputation_changes_nothing_in_a_pipeline_of_experts(
    pairs: list[dict[str, Any]], name: str
) -> None:
    """FP8 with a pipeline, recomputation, accumulation and experts together."""
    for found in pairs:
        recomputed_alike(found[f"{name} experts pp2"], found[f"{name} experts pp2 recomputed"])


@pytest.mark.daily
def test_recomputation_changes_nothing_on_four_ranks(folder: str, alone: dict[str, Any]) -> None:
    both = f"{EP2} {PP2} {ZERO1}"
    layouts = {
        f"{name}{how}": f"--fp8-recipe {name} {both} {flags}"
        for name in TOGETHER
        for how, flags in (("", ""), (" recomputed", RECOMPUTE))
    }
    for found in run_ranks(4, f"{CASES}:trained", folder, layouts, 4, timeout=280):
        for name in TOGETHER:
            recomputed_alike(found[name], found[f"{name} recomputed"])


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_parameters_are_gathered_as_codes(pairs: list[dict[str, Any]], name: str) -> None:
    plain, gathered = (pairs[0][f"{name} {how}"] for how in ("zero1", "gathered"))
    # The same codes; delayed scaling takes the scale of the updated weights instead of its history's.
    assert gathered["losses"] == pytest.approx(plain["losses"], rel=2e-4 if name == "tensorwise" else 2e-3)
    counts = [found[f"{name} gathered"]["counts"] for found in pairs]
    sent = sum(each["param_gather_bytes"] for each in counts)
    before = sum(each["param_gather_bf16_bytes"] for each in counts)
    assert 0.5 < sent / before < 0.56, "decoder linears are nine tenths of this model"


def test_weights_are_cast_anew_when_they_change() -> None:
    [found] = run_ranks(1, f"{CASES}:weights_are_cast_anew", "--fp8-recipe tensorwise")
    assert found == {"changed by the step": True, "follows .data": True, "kept between steps": 0}
