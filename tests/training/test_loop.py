"""The training loop as a whole: resume, other layouts, validation, failures, termination."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch import ROOT, run_ranks
from tests.parity.case import Chain
from tests.second_lane import of_lane
from tests.training.loop_cases import HALF, MODEL, STEPS, TRAINING

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
PLAIN = "--hidden-dropout 0 --attention-dropout 0"
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --virtual-pipeline-model-parallel-size 2"

SECOND_HALF = [str(step) for step in range(HALF + 1, STEPS + 1)]
RESUMED = of_lane(
    {
        "dp2_dropout": DROPOUT,
        "dp2_zero1": f"{PLAIN} {ZERO1}",
        "tp2_sp_dropout": f"{DROPOUT} --tensor-model-parallel-size 2 --sequence-parallel",
        "vpp2": f"{PLAIN} {VPP2}",
        "dp2_zero1_bf16": f"{PLAIN} {ZERO1} --bf16",
        "dp2_bf16": f"{PLAIN} --bf16",
        "pp2_dropout": f"{DROPOUT} {PP2}",
    },
    *("dp2_dropout", "vpp2"),
)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("resumed"))
    results = run_ranks(2, "tests.training.loop_cases:interrupted_and_not", folder, RESUMED, timeout=400)
    return dict(results[0])


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_continues_to_the_bit(resumed: dict[str, Any], name: str) -> None:
    whole, first, second = (resumed[name][part] for part in ("whole", "first", "second"))
    assert first["iteration"] == HALF and not first["finished"] and first["checkpoint"] == f"iter_{HALF:07d}"
    assert sorted(second["steps"], key=int) == SECOND_HALF
    assert {**first["steps"], **second["steps"]} == whole["steps"]
    assert second["valid"][-1] == whole["valid"][-1]
    assert second["finished"] and second["consumed_samples"] == 8 * STEPS


def test_dropout_was_active(resumed: dict[str, Any]) -> None:
    with_dropout = resumed["dp2_dropout"]["whole"]["steps"]["1"][0]
    # Without it layouts differ by rounding alone.
    without = resumed["vpp2"]["whole"]["steps"]["1"][0]
    assert with_dropout != pytest.approx(without, rel=1e-5)


def test_a_checkpoint_continues_under_other_layouts(tmp_path: Path) -> None:
    before = f"{PLAIN} {ZERO1}"
    after = [f"{PLAIN} --tensor-model-parallel-size 2 --use-distributed-optimizer", f"{PLAIN} {VPP2} {ZERO1}"]
    found = run_ranks(
        2, "tests.training.loop_cases:moved_between_layouts", str(tmp_path), before, after, timeout=200
    )[0]
    whole = found["whole"]["steps"]
    for continued in found["continued"]:
        assert "error" not in continued, continued
        assert sorted(continued["steps"], key=int) == SECOND_HALF
        for step in SECOND_HALF:
            # A gradient is a sum of terms that are as large as the loss, whatever its norm.
            assert continued["steps"][step] == pytest.approx(whole[step], abs=1e-5 * max(whole[step]))


def test_a_checkpoint_continues_with_another_padding_of_the_vocabulary(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.training.loop_cases:another_padding", str(tmp_path), "", timeout=200)[0]
    for step in ("4", "5", "6"):
        assert found["padded"]["steps"][step] == pytest.approx(found["whole"]["steps"][step], rel=1e-5)
    assert found["back"]["finished"] and found["back"]["iteration"] == 8


def test_another_padding_under_the_distributed_optimizer_is_refused(tmp_path: Path) -> None:
    flags = "--use-distributed-optimizer"
    found = run_ranks(2, "tests.training.loop_cases:another_padding", str(tmp_path), flags, timeout=200)[0]
    assert "padded to 4352, this run pads it to 4608" in found["padded"]["error"]


def test_validation_counts_every_token_once_under_every_layout(tmp_path: Path) -> None:
    layouts = [PLAIN, f"{PLAIN} --micro-batch-size 1", f"{PLAIN} {PP2}", f"{PLAIN} {VPP2}"]
    # 13 samples fill neither the rounds of two ranks nor the groups of a schedule.
    found = run_ranks(
        2, "tests.training.loop_cases:validations", str(tmp_path), layouts, 13, [None, 5, None], timeout=200
    )
    data = Chain(5, 13)
    tokens = [int(sum(data[i]["loss_mask"].sum() for i in range(count))) for count in (13, 5, 13)]
    for rank in found:
        for everything, some, again in rank:
            assert [everything[1], some[1], again[1]] == tokens
            assert again == everything
            assert everything[0] == pytest.approx(found[0][0][0][0], rel=1e-6)
            assert some[0] == pytest.approx(found[0][0][1][0], rel=1e-6)
            assert abs(some[0] - everything[0]) > 1e-4


def test_a_save_that_fails_is_told_and_training_goes_on(tmp_path: Path) -> None:
    results = run_ranks(2, "tests.training.loop_cases:failing_save", str(tmp_path))
    for result in results:
        assert result["middle"]["finished"] and result["middle"]["checkpoint"] == "iter_0000006"
        assert "CheckpointError: the checkpoint of step 6 is lost" in result["last"]["error"]
        assert "No space left on device" in result["last"]["error"]
        assert "iter_0000004" in result["last"]["error"] and "continues from there" in result["last"]["error"]
        assert "no other is complete" in result["only"]["error"]
        assert result["only"]["error"].endswith("start again: the run begins with its first step")
        assert result["after"]["finished"]
    assert sorted(results[0]["after"]["steps"], key=int)[-2:] == ["5", "6"]
    for folder in ("middle", "last"):
        left = [each.name for each in (tmp_path / folder).iterdir() if each.name.startswith(".")]
        assert left == [], left


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.training.loop_cases:refusals", str(tmp_path))[0]
    assert "CheckpointError" in found["layers"]["error"]
    assert "the checkpoint has 4" in found["layers"]["error"]
    assert "CheckpointError" in found["tied"]["error"]
    assert "nowhere; expected auto, never or the directory" in found["missing"]["error"]
    assert "cannot be continued exactly" in found["strict"]["error"] and ": lr " in found["strict"]["error"]
    assert "num_layers" in found["uneven"]["error"]


def test_a_run_ends_when_its_time_is_over(tmp_path: Path) -> None:
    results = run_ranks(2, "tests.training.loop_cases:out_of_time", str(tmp_path))
    assert [result["iteration"] for result in results] == [1, 1]
    assert results[0]["checkpoint"] == "iter_0000001" and not results[0]["finished"]


def test_sigterm_saves_and_exits_with_0(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = (
        f"{MODEL} {TRAINING} {PLAIN} --save {tmp_path}/saved --metrics-path {metrics} --train-iters 100000"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "mt_megatron.cli", "pretrain", *flags.split()],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 90
        while not (metrics.exists() and '"train"' in metrics.read_text()) and process.poll() is None:
            assert time.monotonic() < deadline, "no step was reported"
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, stderr
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["event"] == "end" and not last["finished"]
    saved = (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text().strip()
    assert int(saved) == last["iteration"] >= 1
    assert f"stopped on request after step {saved}" in stdout
