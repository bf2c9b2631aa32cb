"""The ranks' side of the tests that continue runs of models with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.second_lane import DAILY
from tests.training.loop_cases import run, start

STEPS, HALF = (7, 3) if DAILY else (5, 2)
"""Of a whole run, and of one that is continued."""


def continued_and_not(folder: str, layouts: dict[str, str]) -> dict[str, Any]:
    """For each layout a whole run of ``STEPS`` and one that stops after ``HALF`` and is continued: what they
    recorded, and the names of tensors in which their last checkpoints differ."""
    start()
    results: dict[str, Any] = {}
    for name, flags in layouts.items():
        whole = run(f"{flags} --save {folder}/{name}_whole", folder, f"{name}_whole")
        first = run(f"{flags} --save {folder}/{name} --exit-interval {HALF}", folder, f"{name}_first")
        second = run(f"{flags} --save {folder}/{name}", folder, f"{name}_second")
        at = [Path(folder) / part / f"iter_{STEPS:07d}" for part in (f"{name}_whole", name)]
        results[name] = {"whole": whole, "first": first, "second": second, **_compared(*at)}
    return results


def _compared(one: Path, other: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    if not (one.is_dir() and other.is_dir()):
        return {"missing": True}
    ours, theirs = (
        dist_checkpointing.load_plain_tensors(str(one)),
        dist_checkpointing.load_plain_tensors(str(other)),
    )
    ours, theirs = ({k: v for k, v in each.items() if torch.is_tensor(v)} for each in (ours, theirs))
    biases = {
        name: [float(value.abs().max()), str(value.dtype)]
        for name, value in ours.items()
        if name.endswith("expert_bias")
    }
    differing = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    differing += sorted(ours.keys() ^ theirs.keys())
    dist.barrier()
    return {"differing": differing, "tensors": len(ours), "biases": biases}


def other_sizes(folder: str, saved: str, others: list[str]) -> list[Any]:
    """Three steps under one layout, continued under others."""
    start()
    run(f"{saved} --save {folder}/source --exit-interval 3", folder, "source")
    return [
        run(f"{flags} --save {folder}/after{index}", folder, f"after{index}")
        for index, flags in enumerate(others)
    ]
