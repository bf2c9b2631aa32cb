"""The trainer with multi-token prediction and uneven stages: what it reports, and checkpoints that move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

PLAIN = "--hidden-dropout 0 --attention-dropout 0 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"
CASES = "tests.training.multi_token_cases"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_checkpoint_continues_on_other_stages(tmp_path: Path, tied: bool) -> None:
    plain = f"{PLAIN} --no-untie-embeddings-and-output-weights" if tied else PLAIN
    pipeline = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
    before = f"{plain} {pipeline} Et*3|tmmL --use-distributed-optimizer"
    after = [
        f"{plain} --use-distributed-optimizer",
        f"{plain} {pipeline} 1,1,2,0 --use-distributed-optimizer --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 2",
        f"{plain} --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
    ]
    found = run_ranks(
        2, "tests.training.loop_cases:moved_between_layouts", str(tmp_path), before, after, timeout=240
    )[0]
    whole = found["whole"]
    assert "error" not in whole, whole
    for continued in found["continued"]:
        assert "error" not in continued, continued
        for step in ("4", "5", "6"):
            assert continued["steps"][step] == pytest.approx(whole["steps"][step], rel=1e-5)
            ours, theirs = continued["records"][step], whole["records"][step]
            for depth in ("mtp_1_loss", "mtp_2_loss"):
                assert ours[depth] == pytest.approx(theirs[depth], rel=1e-5)
        assert continued["valid"][-1] == pytest.approx(whole["valid"][-1], rel=1e-5)


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
    assert found["tensorboard"] == ["train/mtp_1_loss", "train/mtp_2_loss"]


def test_what_does_not_come_out_even_is_an_error_before_work_starts(tmp_path: Path) -> None:
    ranks: list[dict[str, Any]] = run_ranks(2, f"{CASES}:refused", str(tmp_path), timeout=120)
    for found in ranks:
        assert found["five layers"].startswith("ConfigError") and "num_layers is 5" in found["five layers"]
        assert "context" in found["context parallel"]
