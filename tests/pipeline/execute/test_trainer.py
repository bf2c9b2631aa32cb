"""``--pipeline-schedule`` in a run: upstream's steps to the bit, switching, resuming, errors beforehand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.csv_form import to_csv
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.training.validate import validate
from tests.launch import run_ranks
from tests.pipeline.execute import table
from tests.training.loop_cases import HALF, MODEL, STEPS, TRAINING

HERE = "tests.pipeline.execute.trainer_ranks"
PLAIN = "--hidden-dropout 0 --attention-dropout 0"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
PP2 = "--pipeline-model-parallel-size 2 --eval-iters 1"
VPP2 = f"{PP2} --virtual-pipeline-model-parallel-size 2"
FIRST_HALF = [str(step) for step in range(1, HALF + 1)]
SECOND_HALF = [str(step) for step in range(HALF + 1, STEPS + 1)]
EXPERTS = (
    "--family deepseek --num-moe-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
    "--moe-token-dispatcher-type alltoall --moe-router-score-function sigmoid --moe-router-dtype fp32 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001 --mtp-num-layers 1"
)
OTHERS = {
    "fp16": f"{PP2} --fp16 --initial-loss-scale 65536 --loss-scale-window 2",
    "parameters gathered in forward": f"{VPP2} --bf16 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --align-param-gather",
    "a loss per token": f"{VPP2} --calculate-per-token-loss",
    "experts": f"{VPP2} {EXPERTS}",
    "fp8": f"{PP2} --bf16 --fp8-recipe tensorwise",
    "the output layer's gradient put off": f"{PP2} --defer-embedding-wgrad-compute "
    "--gradient-accumulation-fusion",
    "uneven stages": f"{PP2} --pipeline-model-parallel-layout 2,1,1,0",
}


@pytest.mark.daily
def test_steps_are_upstreams_to_the_bit(tmp_path: Path) -> None:
    flags = {}
    for name, given in OTHERS.items():
        flags[name] = f"{PLAIN} {given}"
        for schedule in ("breadth_first", "zb_h1"):
            flags[f"{name} {schedule}"] = f"{PLAIN} {given} --pipeline-schedule {schedule}"
    for found in run_ranks(2, f"{HERE}:runs", str(tmp_path), flags, timeout=300):
        assert {name: result["error"] for name, result in found.items() if result["error"]} == {}
        for name in OTHERS:
            for schedule in ("breadth_first", "zb_h1"):
                assert found[f"{name} {schedule}"] == found[name], (name, schedule)


@pytest.mark.daily
def test_packed_documents_are_upstreams_to_the_bit() -> None:
    for upstream, *others in run_ranks(2, f"{HERE}:packed", ["1f1b", "breadth_first", "zb_h1"]):
        assert upstream["packed"] != upstream["not reset"]
        assert all(other == upstream for other in others)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "mine.csv").write_text(to_csv(generate("depth_first", ranks=2, chunks=2, microbatches=4)))
    steps = f"--train-iters {STEPS}"
    loop, dropout = f"{PLAIN} {VPP2} --clip-grad 0 {steps}", f"{DROPOUT} {PP2} {steps}"
    flags = {
        "upstream": f"{loop} --save FOLDER/loop --save-interval {HALF}",
        "named": f"{loop} --pipeline-schedule interleaved",
        "file": f"{loop} --pipeline-schedule FOLDER/mine.csv",
        # Another placement goes on half way.
        "v": f"{loop} --pipeline-schedule zbv --resume FOLDER/loop/iter_{HALF:07d}",
        "dropped": f"{dropout} --pipeline-schedule zb_h1",
        "dropped first": f"{dropout} --pipeline-schedule breadth_first --save FOLDER/d "
        f"--exit-interval {HALF}",
        "dropped second": f"{dropout} --pipeline-schedule zb_h1 --save FOLDER/d",
        "dropped upstream": dropout,
        "dropped named": f"{dropout} --pipeline-schedule 1f1b",
    }
    first: dict[str, Any] = run_ranks(2, f"{HERE}:runs", str(folder), flags, timeout=200)[0]
    assert {name: result["error"] for name, result in first.items() if result["error"]} == {}
    return first


def test_a_file_and_a_name_run_as_upstream_does(found: dict[str, Any]) -> None:
    assert found["named"] == found["upstream"] == found["file"]
    assert len(found["upstream"]["steps"]) == STEPS


def test_1f1b_is_upstream_untouched(found: dict[str, Any]) -> None:
    """With dropout, whose numbers the executor would draw otherwise."""
    assert found["dropped named"] == found["dropped upstream"]
    assert found["dropped named"]["steps"] != found["dropped"]["steps"]


def test_a_v_goes_on_from_a_loops_checkpoint(found: dict[str, Any]) -> None:
    """With the same losses, as nothing is clipped."""
    steps, whole = found["v"]["steps"], found["upstream"]["steps"]
    assert sorted(steps) == SECOND_HALF
    for step, (loss, norm, _) in steps.items():
        assert loss == pytest.approx(whole[step][0], rel=1e-6)
        assert norm == pytest.approx(whole[step][1], rel=1e-5)


def test_schedules_change_between_runs_without_a_trace(found: dict[str, Any]) -> None:
    """With dropout, a checkpoint in between and another schedule before it: the same steps to the bit."""
    whole, first, second = (found[name]["steps"] for name in ("dropped", "dropped first", "dropped second"))
    assert sorted(first) == FIRST_HALF and sorted(second) == SECOND_HALF
    assert {**first, **second} == whole
    assert found["dropped upstream"]["steps"] != whole


MODELS = {
    "dense": "",
    "experts and mtp": EXPERTS,
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["", "--bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("pp", [2, 4])
def test_a_run_that_switches_and_resumes_is_upstreams_to_the_bit(
    tmp_path: Path, pp: int, chunks: int, model: str, dtype: str, record_property: Any
) -> None:
    names = [name.format(cap=pp + 1 + (chunks - 1) * pp, group=3) for name in table.SCHEDULES[chunks][1:]]
    flags = f"{PLAIN} --pipeline-model-parallel-size {pp} --eval-iters 1 --num-layers {2 * pp} {dtype} "
    flags += MODELS[model]
    if chunks > 1:
        flags += f" --virtual-pipeline-model-parallel-size {chunks}"
    found = run_ranks(pp, f"{HERE}:switching", str(tmp_path), flags, pp, chunks, names, timeout=300)[0]
    ran = found.pop("ran")
    assert {name: result["error"] for name, result in found.items() if result["error"]} == {}
    upstream = found["upstream"]
    assert len(upstream["steps"]) == 6 and upstream["valid"]
    assert found["switched"] == upstream
    first, second = found["first"]["steps"], found["second"]["steps"]
    assert sorted(first) == ["1", "2", "3"] and {**first, **second} == upstream["steps"]
    assert len(ran) == 12 and len(set(ran)) == len(names)
    record_property("steps equal to the bit, each by another schedule", len(ran))


@pytest.mark.daily
def test_a_checkpoint_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """It says nothing of the order of stages: random states are those of the run all the same."""
    found = run_ranks(
        2, f"{HERE}:resumed_from_an_earlier_version", str(tmp_path), f"{DROPOUT} {PP2} --eval-iters 0"
    )[0]
    assert found["error"] is None
    assert found["second"] == {step: found["whole"][step] for step in ("3", "4")}


@pytest.mark.daily
def test_a_checkpoint_moves_between_placements(tmp_path: Path) -> None:
    """With tied weights, a further depth and a distributed optimizer: a loop, a V, the loop, a V again."""
    given = (
        f"{PLAIN} {PP2} --clip-grad 0 --no-untie-embeddings-and-output-weights --mtp-num-layers 1 "
        "--hidden-size 128 --use-distributed-optimizer --overlap-grad-reduce --eval-iters 0 --save FOLDER/"
    )
    v = f"{given}v --virtual-pipeline-model-parallel-size 2 --pipeline-schedule"
    flags = {
        "whole": f"{given}whole",
        "loop": f"{given}loop --exit-interval 2",
        "v": f"{v} zbv --resume FOLDER/loop/iter_0000002 --exit-interval 3",
        "back": f"{given}back --resume FOLDER/v/iter_0000003 --exit-interval 4",
        "v again": f"{v.replace('FOLDER/v', 'FOLDER/w')} dualpipev --resume FOLDER/back/iter_0000004",
    }
    found = run_ranks(2, f"{HERE}:runs", str(tmp_path), flags, timeout=200)[0]
    assert {name: result["error"] for name, result in found.items() if result["error"]} == {}
    whole = found.pop("whole")["steps"]
    moved = {step: values for result in found.values() for step, values in result["steps"].items()}
    assert sorted(moved) == sorted(whole)
    for step, (loss, norm, rate) in moved.items():
        assert loss == pytest.approx(whole[step][0], rel=1e-6), step
        assert norm == pytest.approx(whole[step][1], rel=1e-5) and rate == whole[step][2], step


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{PP2} --pipeline-schedule zb_h2", r"expected one of auto, 1f1b, .* Did you mean zb_h1\?"),
        ("--pipeline-schedule zb_h1", "zb_h1 with pipeline_model_parallel_size 1; expected a size above 1"),
        ("--pipeline-schedule 1f1b", "1f1b with pipeline_model_parallel_size 1; expected a size above 1"),
        (f"{PP2} --pipeline-schedule zbv", "1 model chunk.* expected 2, a way there and a way back"),
        (f"{PP2} --pipeline-schedule interleaved", "one chunk per rank with interleaved"),
        (f"{VPP2} --pipeline-schedule 1f1b", "2 chunks per rank with 1f1b"),
        (f"{PP2} --pipeline-schedule hybrid", "hybrid without a number; expected hybrid:K, micro-batches"),
        (f"{PP2} --pipeline-schedule hybrid:x", "expected hybrid:NUMBER"),
        (f"{PP2} --pipeline-schedule hybrid:9", "groups of 9 micro-batches out of 4"),
        (f"{PP2} --pipeline-schedule nowhere.csv", "nowhere.csv.*No such file"),
        (f"{PP2} --pipeline-schedule FOLDER/bad.csv", "B of stage 0 is missing for micro-batch 3"),
        (
            f"{PP2} --pipeline-schedule FOLDER/short.csv",
            "3 micro-batches; expected 2 ranks .* 4 micro-batches",
        ),
        (
            f"{PP2} --pipeline-schedule zb_h1 --use-te-rng-tracker",
            "with use_te_rng_tracker; expected it unset",
        ),
        (
            f"{VPP2} --pipeline-schedule dualpipev --rampup-batch-size 4 4 100",
            "a step of 2 micro-batches: .*expected at least 4",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_the_start(tmp_path: Path, flags: str, expected: str) -> None:
    made = generate("1f1b", ranks=2, microbatches=4)
    lines = to_csv(made).splitlines()
    (tmp_path / "bad.csv").write_text("\n".join([lines[0].removesuffix(",0B3"), *lines[1:]]) + "\n")
    (tmp_path / "short.csv").write_text(to_csv(generate("1f1b", ranks=2, microbatches=3)))
    config = load_config(f"{MODEL} {TRAINING} {flags}".replace("FOLDER", str(tmp_path)).split())
    with pytest.raises(ConfigError) as error:
        validate(config, world_size=2)
    assert re.search(expected, str(error.value), re.DOTALL), error.value
    # The tracker alone is refused elsewhere too, without Transformer Engine.
    assert ("1 problem:" in str(error.value)) != ("use-te-rng-tracker" in flags), error.value


def test_more_micro_batch_counts_than_upstreams() -> None:
    """Interleaved wants a multiple of the ranks; the schedules that do not, run with any number."""
    flags = f"{MODEL} {TRAINING} {VPP2} --global-batch-size 6"
    with pytest.raises(ConfigError, match="take --pipeline-schedule depth_first"):
        validate(load_config(flags.split()), world_size=2)
    validate(load_config(f"{flags} --pipeline-schedule depth_first".split()), world_size=2)
