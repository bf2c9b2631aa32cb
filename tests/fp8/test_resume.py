"""FP8 state in checkpoints: continued to the bit, resharded, between recipes and bf16."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.fp8.recipe import PRESETS
from mt_megatron.training.logging.metrics import read_records
from tests.fp8.resumed import DELAYED
from tests.launch import run_ranks

RESUMED = "tests.fp8.resumed"
GATHERED = "--use-distributed-optimizer --fp8-param-gather"
OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.mark.parametrize(
    "flags",
    [
        DELAYED,
        f"--fp8-recipe nvfp4 {SP}",
        f"{DELAYED} {GATHERED} {OVERLAPPED}",
        f"{DELAYED} --tp-only-amax-red",
    ],
    ids=["delayed", "nvfp4", "delayed-gathered", "delayed-by-samples"],
)
def test_a_resumed_run_continues_to_the_bit(tmp_path: Path, flags: str) -> None:
    """In the middle of a window of magnitudes; with seeded draws."""
    [found, _] = run_ranks(2, f"{RESUMED}:stopped_at", str(tmp_path), flags, [3, 4], 6, timeout=150)
    assert found["parts"] == found["whole"]


def test_checkpoints_of_scripts_keep_the_state(tmp_path: Path) -> None:
    """``save_checkpoint`` of Megatron-LM saves ``model.sharded_state_dict()`` or ``model.state_dict()``."""
    ranks = run_ranks(2, f"{RESUMED}:as_scripts_save", str(tmp_path), timeout=150)
    for found in ranks:
        saved = found["saved"]
        assert saved == ranks[0]["saved"] and "output_layer" in saved and found["step"] == 2
        assert {"layers.1.self_attention.linear_kv_down_proj", "layers.1.mlp.experts.linear_fc1"} <= set(
            saved
        )
        assert sum(row[0] for row in saved.values()) == 1, "one was demoted"
        assert all(any(row[4:]) for row in saved.values()), "magnitudes were noted"
        assert found["by state_dict"] == saved and found["in ours"] == []
        assert found["another layout"]["rows"] == saved and found["another layout"]["steps"] == [2]
        for name in ("another history", "another recipe"):
            assert found[name]["untouched"] and found[name]["steps"] == [0], name
        assert found["bf16"]["rows"] == {} and found["from bf16"]


@pytest.mark.soak
@pytest.mark.parametrize("name", PRESETS)
def test_at_each_of_twenty_random_steps(tmp_path: Path, name: str, record_property: Any) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    record_property("seed", seed)
    steps = sorted(random.Random(seed).sample(range(1, 60), 20))
    # --exit-interval stops at the next multiple: numbers above half of the end have one multiple only.
    steps = [60 + step for step in steps]
    flags = DELAYED if name == "delayed" else f"--fp8-recipe {name}"
    [found] = run_ranks(1, f"{RESUMED}:stopped_at", str(tmp_path), flags, steps, 121, timeout=900)
    assert found["parts"] == found["whole"]


def test_between_bf16_and_recipes(tmp_path: Path) -> None:
    [found] = run_ranks(1, f"{RESUMED}:both_ways", str(tmp_path), timeout=150)
    for name in ("to FP8", "back", "to blockwise", "blockwise to mxfp8"):
        assert found[name].get("iteration", 0) >= 5, (name, found[name])
    for name in ("blockwise_to_mxfp8", "measured_after_bf16"):
        # Counted on from the checkpoint, whatever it was trained with.
        records = read_records(tmp_path / f"{name}.fp8.stage0.jsonl")
        assert min(each["iteration"] for each in records) >= 4
        assert {each["recipe"] for each in records} <= {"mxfp8", "rowwise"}
    for name in ("other history", "other recipe"):
        assert "magnitudes of the one are no state of the other" in found[name]["error"], found[name]
        assert "--load" in found[name]["error"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{DELAYED} {SP}", DELAYED),
        (DELAYED, f"{DELAYED} --pipeline-model-parallel-size 2"),
    ],
    ids=["tp2-dp2", "dp2-pp2"],
)
def test_another_layout_goes_on_with_the_same_scales(tmp_path: Path, before: str, after: str) -> None:
    [found, _] = run_ranks(2, f"{RESUMED}:moved", str(tmp_path), before, after, timeout=150)
    whole, continued = found["whole"]["steps"], found["continued"]["steps"]
    for step in ("4", "5", "6"):
        assert continued[step][0] == pytest.approx(whole[step][0], rel=3e-3)


@pytest.mark.soak
@pytest.mark.parametrize("overlap", ["", OVERLAPPED], ids=["at-once", "overlapped"])
@pytest.mark.parametrize("recipe", [DELAYED, "--fp8-recipe tensorwise"], ids=["delayed", "tensorwise"])
def test_gathered_parameters_at_each_of_ten_random_steps(
    tmp_path: Path, recipe: str, overlap: str, record_property: Any
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    record_property("seed", seed)
    steps = [30 + step for step in sorted(random.Random(seed).sample(range(1, 30), 10))]
    flags = f"{recipe} {GATHERED} {overlap}"
    [found, _] = run_ranks(2, f"{RESUMED}:stopped_at", str(tmp_path), flags, steps, 61, timeout=900)
    assert found["parts"] == found["whole"]


@pytest.mark.daily
def test_two_to_four_tensor_parallel_ranks(tmp_path: Path) -> None:
    before = f"{DELAYED} {SP} --num-query-groups 4 --hidden-size 64 --ffn-hidden-size 128"
    after = before.replace("size 2", "size 4", 1)
    found = run_ranks(4, f"{RESUMED}:moved", str(tmp_path), before, after, timeout=200)[0]
    whole, continued = found["whole"]["steps"], found["continued"]["steps"]
    for step in ("4", "5", "6"):
        assert continued[step][0] == pytest.approx(whole[step][0], rel=3e-3)
