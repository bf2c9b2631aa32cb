"""Batch sizes that ramp up: Megatron's sizes, the same data under every layout, exact over a resume."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.config.rampup import BatchSizes, batch_sizes
from mt_megatron.training.validate import problems
from tests.launch import run_ranks
from tests.training.loop_cases import MODEL, TRAINING
from tests.training.rampup_cases import STEPS

SIZES = [2, 2, 4, 6, 8, 8, 8][:STEPS]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one, two = (str(tmp_path_factory.mktemp(name)) for name in ("one", "two"))
    [alone] = run_ranks(1, "tests.training.rampup_cases:all_cases", one, timeout=300)
    first, _ = run_ranks(2, "tests.training.rampup_cases:all_cases", two, timeout=300)
    return {**alone, "pp2_first": first.pop("first"), "pp2_second": first.pop("second"), **first}


@pytest.mark.parametrize(
    ("start", "increment", "samples", "final"),
    [(2, 2, 12, 8), (16, 8, 1000, 64), (1, 3, 100, 10), (8, 8, 7, 24)],
)
def test_sizes_are_those_of_megatron(start: int, increment: int, samples: int, final: int) -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    theirs = RampupBatchsizeNumMicroBatchesCalculator(final, 1, 1, False, 1, start, increment, samples)
    ours = batch_sizes((start, increment, samples), final)
    consumed = 0
    while consumed < 2 * samples + 5 * final:
        theirs.update(consumed, True)
        assert ours.at(consumed) == theirs.get_current_global_batch_size()
        consumed += ours.at(consumed)


def test_samples_and_steps_are_inverse() -> None:
    sizes = BatchSizes(final=8, start=2, increment=2, samples=12)
    after = [0, *itertools.accumulate(SIZES)]
    assert [sizes.samples_after(step) for step in range(STEPS + 1)] == after
    for step, samples in enumerate(after):
        assert sizes.steps_for(samples) == step
        assert sizes.steps_for(samples + 1) == step
    assert sizes.samples_after(2.5) == 6
    assert BatchSizes(final=8).samples_after(2.5) == 20
    assert sizes.all() == [2, 4, 6, 8]
    assert BatchSizes(final=8, start=2, increment=2, samples=0).at(0) == 8


@pytest.mark.parametrize("name", ["alone", "dp2", "pp2"])
def test_every_step_has_the_size_of_the_ramp(found: dict[str, Any], name: str) -> None:
    records = found[name]["records"]
    consumed = [records[str(step)]["consumed_samples"] for step in range(1, STEPS + 1)]
    assert consumed == list(itertools.accumulate(SIZES))
    if name == "pp2":
        return  # its stages draw other weights
    for step in range(1, STEPS + 1):
        mine, alone = found[name]["steps"][str(step)], found["alone"]["steps"][str(step)]
        assert mine == pytest.approx(alone, rel=2e-5)


def test_the_schedule_counts_samples(found: dict[str, Any]) -> None:
    # Warm-up is the samples of two steps, 4; the decay ends after those of all.
    seen = [0, *itertools.accumulate(SIZES)]
    expected = [
        1e-2 * (done / 4 if done <= 4 else 1 - (done - 4) / (sum(SIZES) - 4)) for done in seen[:STEPS]
    ]
    assert [found["alone"]["steps"][str(step)][2] for step in range(1, STEPS + 1)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("whole", "parts"), [("alone", ("first", "second")), ("pp2", ("pp2_first", "pp2_second"))]
)
def test_a_ramp_is_continued_to_the_bit(found: dict[str, Any], whole: str, parts: tuple[str, str]) -> None:
    first, second = (found[part] for part in parts)
    assert first["iteration"] == 3 and second["finished"]
    assert {**first["steps"], **second["steps"]} == found[whole]["steps"]


WRONG = [
    (
        "--rampup-batch-size 0 2 12 --global-batch-size 8",
        1,
        "expected a first size and an increment of at least 1",
    ),
    ("--rampup-batch-size 2 2 -1 --global-batch-size 8", 1, "a number of samples of at least 0"),
    ("--rampup-batch-size 3 2 12 --global-batch-size 8", 1, "whole increments in between"),
    ("--rampup-batch-size 16 2 12 --global-batch-size 8", 1, "a start of at most that"),
    (
        "--rampup-batch-size 2 2 12 --global-batch-size 8",
        2,
        "which makes a global batch of 2; expected multiples",
    ),
    (
        "--rampup-batch-size 2 2 12 --global-batch-size 8 --micro-batch-size 1 "
        "--pipeline-model-parallel-size 4 --num-layers 8 --virtual-pipeline-model-parallel-size 2",
        4,
        "which makes a step of 2 micro-batches; expected multiples of pipeline_model_parallel_size = 4",
    ),
]


@pytest.mark.parametrize(("flags", "world_size", "says"), WRONG)
def test_a_ramp_that_does_not_come_out_even_is_refused(flags: str, world_size: int, says: str) -> None:
    config = load_config(f"{MODEL} {TRAINING} {flags}".split())
    found = problems(config, world_size=world_size, check_files=False)
    assert any(says in line for line in found), found


def test_a_ramp_needs_its_end() -> None:
    training = TRAINING.replace("--global-batch-size 8 ", "")
    config = load_config(f"{MODEL} {training} --rampup-batch-size 2 2 12".split())
    assert any("without global_batch_size" in line for line in problems(config, check_files=False))
