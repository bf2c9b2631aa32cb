"""The rank's side of the tests of fp16: a tiny model, because CPUs multiply fp16 slowly."""

from __future__ import annotations

from typing import Any

from mt_megatron.data.loader.datasets import Datasets
from mt_megatron.training import loop
from tests.parity.case import Chain
from tests.second_lane import DAILY
from tests.training.faults import injected
from tests.training.loop_cases import run, start

TINY = (
    f"--num-layers 2 --global-batch-size 4 --micro-batch-size {2 if DAILY else 4} --eval-iters 0 "
    "--hidden-dropout 0 --attention-dropout 0 --train-iters 20 --lr 5e-3"
)
OVERFLOW = {"module": "decoder.layers.0.mlp", "kind": "backward", "value": "inf", "rank": 0}


def all_cases(folder: str) -> dict[str, Any]:
    """fp32 and fp16 from the same weights; loss scales that move; overflows put in; a resumed run."""
    start()
    # Data that twenty steps are enough to learn from.
    loop.build_datasets = lambda *args, train_samples, **kwargs: Datasets(Chain(7, train_samples), None, None)
    run(f"{TINY} --save {folder}/weights --train-iters 1", folder, "weights")
    base = f"{TINY} --load {folder}/weights --resume never"
    fp16 = f"{base} --fp16 --initial-loss-scale 1024"
    moving = f"{fp16} --loss-scale-window 4 --hysteresis 1"
    found = {
        "fp32": run(base, folder, "fp32"),
        "fp16": run(fp16, folder, "fp16"),
        "moving": run(moving, folder, "moving"),
    }
    with injected({**OVERFLOW, "steps": [6]}):
        found["overflow"] = run(moving, folder, "overflow")
    if not DAILY:
        return found
    found["constant"] = run(f"{fp16} --loss-scale 512", folder, "constant")
    resumed = f"{TINY} --fp16 --initial-loss-scale 1024 --loss-scale-window 4 --hysteresis 1"
    with injected({**OVERFLOW, "steps": [6]}):
        flags = f"{resumed} --load {folder}/weights --save {folder}/resumed"
        found["first"] = run(f"{flags} --exit-interval 7", folder, "first")
        found["second"] = run(flags, folder, "second")
    with injected({**OVERFLOW, "steps": list(range(100))}):
        endless = f"{fp16} --initial-loss-scale 8 --min-loss-scale 2 --on-divergence stop"
        found["endless"] = run(endless, folder, "endless")
        found["endless_constant"] = run(f"{fp16} --loss-scale 8", folder, "endless_constant")
    return found
