"""Undo leaves nothing behind: the run afterwards equals the one that was never perturbed, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.scope.lab.undo_cases import PERTURBATIONS

EVERY = [*PERTURBATIONS, "pair"]
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
ZERO1 = f"--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {DROPOUT}"
TENSOR = f"--tensor-model-parallel-size 2 --sequence-parallel --fp16 --initial-loss-scale 256 {DROPOUT}"
FP8 = "--bf16 --fp8-recipe delayed --fp8-amax-history-len 4 --no-first-last-layers-bf16"


def _undone(world: int, flags: str, names: list[str], model: str = "small", seed: int = 0) -> None:
    found: list[list[dict[str, Any]]] = run_ranks(
        world, "tests.scope.lab.undo_cases:undone", flags, model, names, seed, timeout=900
    )
    for rank, trials in enumerate(found):
        assert len(trials) == len(names)
        for trial in trials:
            assert trial["back"] and trial["same"], (rank, trial)
    for trials in zip(*found, strict=True):
        assert any(trial["changed"] for trial in trials), "nothing was perturbed, so that nothing was proved"


def test_every_kind_on_one_rank() -> None:
    _undone(1, DROPOUT, EVERY)


def test_with_the_distributed_optimizer() -> None:
    _undone(2, ZERO1, ["noise", "flip", "pair"])


@pytest.mark.daily
@pytest.mark.parametrize(
    ("world", "flags", "model"),
    [
        (2, ZERO1, "small"),
        (2, TENSOR, "small"),
        (2, f"--pipeline-model-parallel-size 2 {DROPOUT}", "small"),
        (2, f"--context-parallel-size 2 {DROPOUT}", "small"),
        (1, FP8, "small"),
        (2, f"{FP8} --use-distributed-optimizer --fp8-param-gather", "small"),
        (2, "--expert-model-parallel-size 2", "mixture"),
    ],
    ids=["zero 1", "tp", "pp", "cp", "fp8", "fp8 gathers", "experts"],
)
def test_every_kind_in_every_layout(world: int, flags: str, model: str) -> None:
    names = [name for name in EVERY if model == "small" or name not in ("flip", "stuck")]
    _undone(world, flags, names, model)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_trials(seed: int) -> None:
    """50 trials for each seed: two layouts of two ranks, and one rank."""
    names = (EVERY * 8)[:50]
    world, flags = [(1, DROPOUT), (2, ZERO1), (2, TENSOR), (1, FP8)][seed]
    _undone(world, flags, names, seed=seed + 1)
