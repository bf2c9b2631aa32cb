"""The trainer with multi-token prediction and uneven stages: what it reports, and checkpoints that move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.planning.validate.model import model_problems
from tests.launch import run_ranks

PLAIN = "--hidden-dropout 0 --attention-dropout 0 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"
CASES = "tests.training.architectures.multi_token_cases"


ZERO1 = "--use-distributed-optimizer"
PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
EMPTY_LAST = f"{PIPELINE} Et*4|mmL {ZERO1} --overlap-grad-reduce --overlap-param-gather"
CHUNKS = (
    f"{PIPELINE} 1,1,2,0 {ZERO1} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 2"
)
TENSOR = f"--tensor-model-parallel-size 2 --sequence-parallel {ZERO1}"


def test_a_checkpoint_continues_on_other_stages(tmp_path: Path) -> None:
    # At the usual rate the norm jumps, and rounding of another order of sums with it.
    plain = f"{PLAIN} --lr 1e-3"
    tied = f"{plain} --no-untie-embeddings-and-output-weights"
    plans = {
        "untied": (f"{plain} {PIPELINE} Et*3|tmmL {ZERO1}", [f"{plain} {CHUNKS}", f"{plain} {TENSOR}"]),
        "tied": (f"{tied} {EMPTY_LAST}", [f"{tied} {ZERO1}", f"{tied} {CHUNKS}"]),
    }
    found = run_ranks(2, f"{CASES}:moved", str(tmp_path), plans, timeout=300)[0]
    for name, (whole, *others) in found.items():
        assert "error" not in whole, (name, whole)
        assert len(others) == 2
        for continued in others:
            assert "error" not in continued, (name, continued)
            for step in ("4", "5", "6"):
                ours, theirs = continued["records"][step], whole["records"][step]
                for loss in ("loss", "mtp_1_loss", "mtp_2_loss"):
                    assert ours[loss] == pytest.approx(theirs[loss], rel=1e-6), (name, step)
                # The norm is summed in fp32, in another order under every layout.
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4), (name, step)
            assert continued["valid"][-1] == pytest.approx(whole["valid"][-1], rel=1e-6)


def test_what_is_reported_is_the_main_loss_and_the_depths_apart(tmp_path: Path) -> None:
    (found,) = run_ranks(1, f"{CASES}:reports", str(tmp_path), PLAIN, timeout=200)
    on, off = found["on"], found["off"]
    # Both begin with the same weights: depths are made after the rest.
    assert on["records"]["1"]["loss"] == off["records"]["1"]["loss"]
    assert on["records"]["6"]["loss"] != off["records"]["6"]["loss"]
    for record in on["records"].values():
        assert 0 < record["mtp_1_loss"] < 20 and 0 < record["mtp_2_loss"] < 20
        assert len({record["loss"], record["mtp_1_loss"], record["mtp_2_loss"]}) == 3
    assert not any("mtp" in name for record in off["records"].values() for name in record)
    # The depths have no part in what is validated: the weights decide, and none of them is a depth's.
    assert found["validated"]["with depths"] == found["validated"]["without"]
    # Three steps of three micro-batches with three losses each, and no block of logits a second time.
    assert (found["blocks"]["fused"], found["blocks"]["again"]) == (27, 0)
    assert found["tensorboard"] == ["train/mtp_1_loss", "train/mtp_2_loss"]


def test_what_does_not_come_out_even_is_an_error_before_work_starts(tmp_path: Path) -> None:
    ranks: list[dict[str, Any]] = run_ranks(2, f"{CASES}:refused", str(tmp_path), timeout=120)
    for found in ranks:
        assert found["five layers"].startswith("ConfigError") and "num_layers is 5" in found["five layers"]
        assert "context" in found["context parallel"]


@pytest.mark.parametrize(("layers", "fits"), [(3, True), (4, False)])
def test_recomputation_counts_the_layers_of_the_longest_stage(layers: int, fits: bool) -> None:
    flags = (
        f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 {PIPELINE} 3,1 --mtp-num-layers 1 "
        f"--recompute-granularity full --recompute-method block --recompute-num-layers {layers}"
    )
    found = [line for line in model_problems(load_config(flags.split())) if "recompute" in line]
    assert found == ([] if fits else [found[0]])
    assert fits or "recompute_num_layers is 4; expected 1 to 3" in found[0]
