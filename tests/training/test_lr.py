"""The schedule of learning rate and weight decay against closed forms."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.training.arguments import load_config
from mt_megatron.training.lr import build_scheduler, learning_rate, schedule_changes

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
    assert schedule_changes(saved, scheduler(20)) == ["lr_decay_steps 80 -> 160", "wd_incr_steps 80 -> 160"]
