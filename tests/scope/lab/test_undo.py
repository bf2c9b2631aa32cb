"""What is undone leaves nothing: the run afterwards equals the one that was never perturbed, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.scope.lab.undo_cases import PERTURBATIONS

EVERY = [*PERTURBATIONS, "pair"]
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


def _undone(world: int, flags: str, names: list[str], model: str = "small") -> None:
    found: list[list[dict[str, Any]]] = run_ranks(
        world, "tests.scope.lab.undo_cases:undone", flags, model, names, timeout=300
    )
    for rank, trials in enumerate(found):
        for trial in trials:
            assert trial["back"] and trial["same"], (rank, trial)
    for trials in zip(*found, strict=True):
        assert any(trial["changed"] for trial in trials), "nothing was perturbed, so that nothing was proved"


def test_every_kind_on_one_rank() -> None:
    _undone(1, DROPOUT, EVERY)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (f"--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {DROPOUT}", EVERY),
        (f"--tensor-model-parallel-size 2 --sequence-parallel --fp16 {DROPOUT}", ["noise", "flip"]),
    ],
    ids=["distributed optimizer", "tensor parallel"],
)
def test_on_two_ranks(flags: str, names: list[str]) -> None:
    _undone(2, flags, names)
