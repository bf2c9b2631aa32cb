"""The ranks' side of the tests of what a run says of its experts."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mt_megatron.config.parse import load_config
from mt_megatron.training import step
from mt_megatron.training.logging.metrics import read_records
from mt_megatron.training.loop import train
from mt_megatron.training.validate import validate
from tests.second_lane import DAILY
from tests.training.faults import injected
from tests.training.loop_cases import MODEL, TRAINING, start

EXPERTS = (
    "--family deepseek --num-moe-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
    "--moe-token-dispatcher-type alltoall --moe-router-score-function sigmoid --moe-router-dtype fp32 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
)
LOSSES = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001 --moe-z-loss-coeff 0.0001"
FEW = "" if DAILY else "--micro-batch-size 4"
"""The same samples in half as many micro-batches, in the first lane."""

TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


def run(folder: str, name: str, flags: str) -> dict[str, Any]:
    """One run of three steps, reported after the second and the third; biases at its end, by layer."""
    from megatron.core.transformer.moe.router import TopKRouter

    routers: dict[int, Any] = {}
    set_layer_number = TopKRouter.set_layer_number

    def look(self: Any, number: int) -> None:
        routers[number] = self
        set_layer_number(self, number)

    TopKRouter.set_layer_number = look
    lines = io.StringIO()
    try:
        config = load_config(
            f"{MODEL} {TRAINING} {FEW} --train-iters 3 --log-interval 2 --save {folder}/{name} --scope off "
            f"{flags}".split()
        )
        validate(config, world_size=dist.get_world_size())
        with contextlib.redirect_stdout(lines):
            train(config)
    finally:
        TopKRouter.set_layer_number = set_layer_number
    records = read_records(Path(folder) / name / "metrics.jsonl") if dist.get_rank() == 0 else []
    return {
        "lines": lines.getvalue().splitlines(),
        "records": [record for record in records if record["event"] == "train"],
        "biases": {
            number: None if router.expert_bias is None else router.expert_bias.tolist()
            for number, router in routers.items()
        },
    }


@contextlib.contextmanager
def counted(owner: Any, name: str) -> Iterator[list[None]]:
    """One entry per call of ``owner.name`` within."""
    original, calls = getattr(owner, name), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    setattr(owner, name, counting)
    try:
        yield calls
    finally:
        setattr(owner, name, original)


FAULT = {"module": "decoder.layers.0.mlp", "kind": "backward", "value": "nan", "steps": [2], "rank": 0}


def counts(folder: str) -> dict[str, dict[str, int]]:
    """All-reduces and moves of the biases in runs of three steps: a report after each, after the last
    alone, and that with the second step skipped for a NaN."""
    found = {}
    for name, interval, fault in (("each", 1, None), ("last", 3, None), ("skipped", 3, FAULT)):
        flags = f"{EXPERTS} {LOSSES} --log-interval {interval} --on-divergence skip"
        with (
            counted(dist, "all_reduce") as reductions,
            counted(step, "update_expert_bias") as updates,
            injected(fault),
        ):
            run(folder, f"counts_{name}", flags)
        found[name] = {"reductions": len(reductions), "updates": len(updates)}
    return found


def runs(folder: str) -> dict[str, Any]:
    start()
    board = f"--tensorboard-dir {folder}/tb" if TENSORBOARD else ""
    stages = "--pipeline-model-parallel-size 2 --moe-layer-freq 0 0 1 1 --mtp-num-layers 1"
    return {
        "pp2": run(folder, "pp2", f"{EXPERTS} {LOSSES} {stages} {board}"),
        "ep2": run(folder, "ep2", f"{EXPERTS} --expert-model-parallel-size 2 --moe-layer-freq 0 1 1 1"),
        "capacity": run(
            folder,
            "capacity",
            f"{EXPERTS} --moe-router-load-balancing-type none --moe-expert-capacity-factor 0.5",
        ),
        "dense": run(folder, "dense", ""),
        "counts": counts(folder),
    }
