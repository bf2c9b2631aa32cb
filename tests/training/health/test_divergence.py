"""What a run does about a step that diverges: stop, leave it out, go back; never for ever."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.checkpoint.progress import Progress
from mt_megatron.training import step as steps
from mt_megatron.training.health.divergence import DivergenceWatch
from mt_megatron.training.health.recovery import Recovery
from tests.launch import run_ranks
from tests.second_lane import DAILY, of_lane

NAN = {"module": "decoder.layers.0.mlp", "kind": "forward", "value": "nan", "rank": 1}
ELSEWHERE = {"module": "decoder.layers.2.mlp", "kind": "backward", "value": "inf", "rank": 0}
SKIP, BACK = "--on-divergence skip", "--on-divergence rollback --save-interval 3"

EVERY: dict[str, dict[str, Any]] = {
    "sound": {"flags": "--train-iters 8"},
    "skipped": {"flags": f"{SKIP} --train-iters 8", "fault": {**NAN, "steps": [4, 5]}},
    "skipped_elsewhere": {"flags": f"{SKIP} --train-iters 8", "fault": {**ELSEWHERE, "steps": [4, 5]}},
    "rolled_back": {"flags": f"{BACK} --train-iters 8", "fault": {**NAN, "steps": [5]}},
    "interrupted": {
        "flags": f"{BACK} --train-iters 8 --exit-interval 7 --async-save",
        "fault": {**NAN, "steps": [5]},
        "then": "--exit-interval 8",
    },
    "nowhere_to_go": {"flags": f"{BACK} --train-iters 8", "fault": {**NAN, "steps": [2]}},
    "for_ever": {"flags": f"{SKIP} --max-divergences 2", "fault": {**NAN, "steps": list(range(100))}},
    "back_for_ever": {
        "flags": f"{BACK} --save-interval 1 --max-divergences 2",
        "fault": {**NAN, "steps": list(range(3, 100))},
    },
    "large_norm": {"flags": f"{SKIP} --grad-norm-threshold 1e-6 --max-divergences 1"},
}
CASES = of_lane(EVERY, "sound", "skipped", "skipped_elsewhere", "rolled_back", "nowhere_to_go", "large_norm")
if not DAILY:
    # As many samples in half as many micro-batches.
    CASES = {name: {**case, "flags": f"{case['flags']} --micro-batch-size 2"} for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("divergence"))
    return run_ranks(2, "tests.training.health.divergence_cases:runs", folder, CASES, timeout=400)


def test_a_step_left_out_changes_nothing_wherever_its_fault_is(found: list[dict[str, Any]]) -> None:
    skipped, elsewhere, sound = (found[0][name] for name in ("skipped", "skipped_elsewhere", "sound"))
    for step in ("6", "7", "8"):
        assert skipped["steps"][step] == elsewhere["steps"][step]
        assert skipped["steps"][step] != sound["steps"][step]
    # The schedule waits for updates, the data does not.
    assert skipped["steps"]["6"][2] == sound["steps"]["4"][2]
    assert skipped["skipped_iterations"] == 2 and skipped["consumed_samples"] == sound["consumed_samples"]
    assert skipped["finished"]
    assert [each["iteration"] for each in skipped["divergences"]] == [4, 5]
    assert "decoder.layers.0.mlp" in skipped["divergences"][0]["found"]


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_left_out_leaves_no_trace_in_fp8(tmp_path: Path, policy: str) -> None:
    """Neither its magnitudes nor, after a rollback, another number of steps than the run's."""
    target = "tests.training.health.divergence_cases:fp8_of_a_step_left_out"
    [found] = run_ranks(1, target, str(tmp_path), policy, timeout=100)
    assert [(iteration, step) for iteration, step, _ in found] == [(n, n) for n in range(1, 7)]
    rows = [rows for _, _, rows in found]
    assert rows[2] != rows[1] and rows[4] != rows[3], "a control: other steps leave some"
    assert rows[3] == (rows[2] if policy == "skip" else rows[1]), "of the third step, or of the checkpoint"


def test_a_rollback_leaves_the_weights_of_the_checkpoint_and_goes_on_with_later_data(
    found: list[dict[str, Any]],
) -> None:
    # Back to step 3 after step 5 is what leaving out 4 and 5 comes to.
    back, skipped = found[0]["rolled_back"], found[0]["skipped"]
    for step in ("6", "7", "8"):
        assert back["steps"][step] == skipped["steps"][step]
    assert back["steps"]["4"] != skipped["steps"]["4"]
    assert back["skipped_iterations"] == 2 and back["consumed_samples"] == skipped["consumed_samples"]
    assert back["divergences"][0]["action"] == "rollback"


@pytest.mark.daily
def test_a_run_that_rolled_back_is_continued_to_the_bit(found: list[dict[str, Any]]) -> None:
    whole, first, second = (found[0][name] for name in ("rolled_back", "interrupted", "interrupted_then"))
    assert first["iteration"] == 7 and sorted(second["steps"]) == ["8"]
    assert {**first["steps"], **second["steps"]} == whole["steps"]
    assert second["skipped_iterations"] == 2


def test_every_rank_stops_when_there_is_nowhere_to_go_back_to(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "DivergenceError: iteration 2" in rank["nowhere_to_go"]["error"]
        assert "no complete checkpoint to go back to" in rank["nowhere_to_go"]["error"]


@pytest.mark.parametrize(
    ("name", "last"),
    [
        pytest.param("for_ever", 3, marks=pytest.mark.daily),
        pytest.param("back_for_ever", 5, marks=pytest.mark.daily),
        ("large_norm", 2),
    ],
)
def test_divergence_is_not_put_up_with_for_ever(found: list[dict[str, Any]], name: str, last: int) -> None:
    errors = [rank[name]["error"] for rank in found]
    assert errors[0] == errors[1]
    assert f"DivergenceError: iteration {last}:" in errors[0] and "--max-divergences" in errors[0]


def test_a_gradient_norm_above_the_threshold_is_told(found: list[dict[str, Any]]) -> None:
    assert "more than 1e-06; the loss is" in found[0]["large_norm"]["error"]


def test_what_a_perturbation_made_is_not_said_of_the_machine() -> None:
    judgement: Any = SimpleNamespace(not_finite=True, reason="the loss is nan")
    options: Any = SimpleNamespace(on_divergence="skip", max_divergences=9)
    said: list[str] = []
    recovery = Recovery(options, say=said.append, record=lambda *values: None)
    for perturbed in ("noise", None):
        recovery.after(judgement, Progress(), explain=lambda: None, roll_back=Progress, perturbed=perturbed)
    assert "perturbed by (noise) is finite: it comes from the perturbation" in said[0]
    assert "suspect the memory" in said[1] and "perturb" not in said[1]


def test_a_spike_is_measured_against_the_mean_of_the_steps_taken() -> None:
    watch = DivergenceWatch(spike_factor=2.0)
    sound = {"norm": 1.0, "norm_is_bad": False}
    for step in range(10):
        assert watch.judge(loss=100.0 if step == 0 else 4.0, **sound) is None
        watch.mean.add(4.0)
    assert watch.judge(loss=8.0, **sound) is None
    judgement = watch.judge(loss=8.1, **sound)
    assert judgement is not None and not judgement.not_finite
    assert "8.1000, more than 2 x its running mean 4.0000" in judgement.reason


def test_the_mean_weighs_the_last_hundred_steps() -> None:
    watch = DivergenceWatch()
    for step in range(1, 101):
        watch.mean.add(float(step))
    assert watch.mean.value == pytest.approx(50.5)
    watch.mean.add(150.5)
    assert watch.mean.value == pytest.approx(51.5)


@pytest.mark.parametrize(
    ("norm", "limit", "bad"),
    [
        (1.0, None, False),
        (math.inf, None, True),
        (math.nan, None, True),
        (3.0, 2.0, True),
        (None, 2.0, False),
    ],
)
def test_which_norms_are_bad(norm: float | None, limit: float | None, bad: bool) -> None:
    assert DivergenceWatch(grad_norm_limit=limit).norm_is_bad(norm) == bad


class _OneRank:
    """As much of a job as ``train_step`` asks for."""

    layout = SimpleNamespace(dp=1, world_size=1)

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return values


@pytest.mark.parametrize(("limit", "norm", "bad"), [(None, None, False), (9.0, 7.0, False), (5.0, 7.0, True)])
def test_a_limit_is_enough_for_the_norm_to_be_computed(
    limit: float | None, norm: float | None, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither clipping nor the search for NaN asks for it."""
    parts: dict[str, Any] = {
        "forget": None,
        "forward_backward": [],
        "summed": [2.0, 1.0],
        "depth_sums": [],
        "learning_rate": 0.1,
        "prepare": False,
        "gradient_norm": 7.0,
        "clip_and_apply": None,
        "update_expert_bias": None,
    }
    for name, found in parts.items():
        monkeypatch.setattr(steps, name, lambda *args, found=found: found)
    optimizer = SimpleNamespace(config=SimpleNamespace(clip_grad=0.0))
    scheduler = SimpleNamespace(step=lambda samples: None)
    trainable: Any = SimpleNamespace(optimizer=optimizer, scheduler=scheduler, chunks=[])
    job: Any = _OneRank()
    result = steps.train_step(
        trainable,
        lambda batches, model: None,  # type: ignore[arg-type,return-value]
        [],
        steps.Shape(num_microbatches=1, micro_batch_size=1, seq_length=4),
        job,
        iteration=1,
        watch=DivergenceWatch(check_gradients=False, grad_norm_limit=limit),
    )
    assert result.grad_norm == norm
    assert (result.diverged is not None) == result.skipped == bad


def test_overflows_are_trouble_only_when_the_scale_is_stuck() -> None:
    watch = DivergenceWatch(hysteresis=2)
    assert all(watch.overflowed(scale_is_stuck=False) is None for _ in range(50))
    assert watch.overflowed(scale_is_stuck=True) is None
    assert watch.overflowed(scale_is_stuck=True) is None
    judgement = watch.overflowed(scale_is_stuck=True)
    assert judgement is not None and "3 steps in a row" in judgement.reason
