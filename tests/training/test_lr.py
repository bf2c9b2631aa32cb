"""The schedule of learning rate and weight decay against closed forms."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.checkpoint.load import schedule_changes
from mt_megatron.config.parse import load_config
from mt_megatron.errors import ConfigError
from mt_megatron.training.lr import build_scheduler, learning_rate, warmup_steps

BATCH = 8


def rates(flags: str, steps: int) -> list[float]:
    optimizer = SimpleNamespace(param_groups=[{"max_lr": 1e-2, "min_lr": 1e-3}])
    scheduler = build_scheduler(load_config(flags.split()), optimizer, BATCH)
    found = []
    for _ in range(steps):
        found.append(learning_rate(optimizer))
        scheduler.step(BATCH)
    return found


def test_warm_up_then_cosine_counts_iterations_not_samples() -> None:
    found = rates("--lr 1e-2 --min-lr 1e-3 --train-iters 20 --lr-warmup-iters 4 --lr-decay-style cosine", 21)
    for step, rate in enumerate(found):
        if step <= 4:
            expected = 1e-2 * step / 4
        else:
            expected = 1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * (step - 4) / 16))
        assert rate == pytest.approx(expected, rel=1e-12)


def test_warm_up_fraction_and_constant() -> None:
    found = rates(
        "--lr 1e-2 --min-lr 1e-3 --train-iters 20 --lr-warmup-fraction 0.1 --lr-decay-style constant", 5
    )
    assert found == pytest.approx([0.0, 5e-3, 1e-2, 1e-2, 1e-2])


WSD = (
    "--lr 1e-2 --min-lr 1e-3 --train-iters 20 --lr-warmup-iters 4 --lr-decay-style WSD --lr-wsd-decay-iters 6"
)


def wsd_rate(style: str, step: int) -> float:
    """Warm-up over 4 steps, 10 stable ones, decay over the last 6."""
    if step <= 4:
        return 1e-2 * step / 4
    done = max(0, step - 14) / 6
    share = {
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "exponential": 2 * 0.5**done - 1,
    }[style]
    return 1e-3 + 9e-3 * share


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential"])
def test_wsd_is_stable_and_then_decays(style: str) -> None:
    found = rates(f"{WSD} --lr-wsd-decay-style {style}", 21)
    assert found == pytest.approx([wsd_rate(style, step) for step in range(21)], rel=1e-12)
    assert found[4:15] == pytest.approx([1e-2] * 11, rel=1e-12)


@pytest.mark.parametrize("at", [2, 9, 17])
def test_wsd_is_continued_in_every_phase(at: int) -> None:
    flags = f"{WSD} --lr-wsd-decay-style cosine".split()
    groups = [SimpleNamespace(param_groups=[{"max_lr": 1e-2, "min_lr": 1e-3}]) for _ in range(2)]
    first, second = (build_scheduler(load_config(flags), each, BATCH) for each in groups)
    for _ in range(at):
        first.step(BATCH)
    second.load_state_dict(first.state_dict())
    for step in range(at, 20):
        assert learning_rate(groups[1]) == learning_rate(groups[0])
        assert learning_rate(groups[1]) == pytest.approx(wsd_rate("cosine", step), rel=1e-12)
        first.step(BATCH)
        second.step(BATCH)


def test_a_schedule_in_samples_ends_within_a_step() -> None:
    """Megatron-LM's scheduler counts samples: 1,007 of them, of which 30 warm up, in steps of 8."""
    flags = "--lr 1e-2 --min-lr 0 --global-batch-size 8 --train-samples 1007 --lr-warmup-samples 30"
    group = SimpleNamespace(param_groups=[{"max_lr": 1e-2, "min_lr": 0.0}])
    scheduler = build_scheduler(load_config(flags.split()), group, 8)
    for step in range(126):
        samples = 8 * step
        share = samples / 30 if samples <= 30 else (1007 - samples) / (1007 - 30)
        assert learning_rate(group) == pytest.approx(1e-2 * share, rel=1e-9)
        scheduler.step(8)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--train-iters 99", 0),
        ("--train-iters 1000", 10),
        ("--train-iters 1000 --lr-decay-iters 500", 5),
        ("--train-iters 1000000", 2000),
        ("--train-iters 1000 --lr-warmup-iters 0", 0),
        ("--train-iters 1000 --lr-warmup-iters 7", 7),
        ("--train-iters 1000 --lr-warmup-fraction 0.5", 500),
    ],
)
def test_how_long_the_warm_up_is(flags: str, steps: int) -> None:
    train = load_config(flags.split()).train
    assert warmup_steps(train, train.lr_decay_iters or train.train_iters or 0) == steps


def test_the_defaults_are_the_fields() -> None:
    optimizer = load_config([]).optimizer
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.95, 1e-8)
    assert (optimizer.clip_grad, optimizer.weight_decay) == (1.0, 0.1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-iters 20", "--lr not set"),
        ("--lr 1e-2", "--train-iters not set"),
        ("--lr 1e-2 --train-iters 4 --lr-warmup-iters 4", "warm-up takes 4 steps of 4"),
    ],
)
def test_what_is_missing_or_impossible_is_named(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rates(flags, 1)


def test_changes_against_a_checkpoint_are_named() -> None:
    def scheduler(iters: int) -> Any:
        optimizer = SimpleNamespace(param_groups=[{"max_lr": 1e-2, "min_lr": 0.0}])
        return build_scheduler(load_config(f"--lr 1e-2 --train-iters {iters}".split()), optimizer, BATCH)

    saved = scheduler(10).state_dict()
    assert schedule_changes(saved, scheduler(10)) == []
    assert schedule_changes(saved, scheduler(20)) == [
        "lr_decay_iters 80 -> 160 samples",
        "train_iters 80 -> 160 samples",
    ]
