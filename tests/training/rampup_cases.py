"""The ranks' side of the tests of a batch size that ramps up."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.second_lane import DAILY
from tests.training.loop_cases import run, start

STEPS = 7 if DAILY else 5
"""The size grows in the first five."""

RAMP = (
    "--global-batch-size 8 --rampup-batch-size 2 2 12 --micro-batch-size 1 "
    f"--train-iters {STEPS} --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 "
    f"--lr-decay-style linear --lr-warmup-iters 2 --num-layers {4 if DAILY else 2}"
)
LAYOUTS = {
    1: {"alone": ""},
    2: {"dp2": "", "pp2": "--pipeline-model-parallel-size 2"},
}


def all_cases(folder: str) -> dict[str, Any]:
    """Whole under each layout of so many ranks, and under the last one interrupted in the ramp."""
    start()
    world = dist.get_world_size() if dist.is_initialized() else 1
    found = {name: run(f"{RAMP} {flags}", folder, name) for name, flags in LAYOUTS[world].items()}
    save = f"--save {folder}/saved"
    found["first"] = run(f"{RAMP} {flags_of(world)} {save} --exit-interval 3", folder, "first")
    found["second"] = run(f"{RAMP} {flags_of(world)} {save}", folder, "second")
    return found


def flags_of(world: int) -> str:
    """Flags of the last layout of so many ranks."""
    return list(LAYOUTS[world].values())[-1]
