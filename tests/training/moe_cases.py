"""The ranks' side of the tests of what a run says of its experts."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.training.arguments import load_config
from mt_megatron.training.loop import train
from mt_megatron.training.metrics import read_records
from mt_megatron.training.validate import validate
from tests.training.loop_cases import MODEL, TRAINING, start

EXPERTS = (
    "--family deepseek --num-moe-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
    "--moe-token-dispatcher-type alltoall --moe-router-score-function sigmoid --moe-router-dtype fp32 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
)
LOSSES = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001 --moe-z-loss-coeff 0.0001"
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
            f"{MODEL} {TRAINING} --train-iters 3 --log-interval 2 --save {folder}/{name} {flags}".split()
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


def collectives(folder: str) -> dict[str, int]:
    """All-reduces of a run of three steps that reports after each, and after the last alone."""
    counts = {}
    original = dist.all_reduce
    for name, interval in (("each", 1), ("last", 3)):
        sizes: list[int] = []

        def counting(tensor: torch.Tensor, *args: Any, sizes: list[int] = sizes, **kwargs: Any) -> Any:
            sizes.append(tensor.numel())
            return original(tensor, *args, **kwargs)

        dist.all_reduce = counting
        try:
            run(folder, f"collectives_{name}", f"{EXPERTS} {LOSSES} --log-interval {interval}")
        finally:
            dist.all_reduce = original
        counts[name] = len(sizes)
    return counts


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
        "collectives": collectives(folder),
    }
