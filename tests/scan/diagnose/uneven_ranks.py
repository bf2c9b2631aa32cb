"""A mixture whose routers prefer one rank's experts after a while: the ranks' side of the live test."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mt_megatron.config.parse import load_config
from mt_megatron.scan.drill.inject import skew_routers
from mt_megatron.seams import events
from mt_megatron.training.loop import train
from mt_megatron.training.validate import validate
from tests.training.loop_cases import MODEL, TRAINING, start

EXPERTS = (
    "--family mixtral --num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --seq-length 64 "
    "--num-moe-experts 4 --moe-router-topk 1 --moe-router-pre-softmax "
    "--moe-ffn-hidden-size {width} --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --eval-iters 0 "
    "--expert-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 8 --lr 1e-5 --log-interval 1000"
)
RANK = 1


def trained(folder: str, steps: int, uneven_from: int, width: int, bias: float) -> dict[str, Any]:
    """``steps`` steps, from ``uneven_from`` on with ``bias`` more for the experts of rank ``RANK``; rows that
    this rank's experts got, by step."""
    start()
    rows: dict[int, int] = {}
    at = {"step": 0}
    undo: list[Callable[[], None]] = []

    def hear(phase: str, name: str, attrs: Mapping[str, Any]) -> None:
        if phase != "begin":
            return
        if name == "step":
            at["step"] = int(attrs["iteration"])
            if at["step"] == uneven_from and bias:
                undo.append(skew_routers((RANK,), bias))
        elif name == "module" and "work" in attrs:
            rows[at["step"]] = rows.get(at["step"], 0) + attrs["work"]

    stop = events.subscribe(hear)
    watched = f"--scan-dir {folder} --no-scan-alerts --scope off"
    flags = f"{EXPERTS.format(width=width)} --train-iters {steps} {watched}"
    config = load_config(f"{MODEL} {TRAINING} {flags}".split())
    validate(config, world_size=dist.get_world_size())
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(config)
    finally:
        stop()
        for each in undo:
            each()
    assert (Path(folder) / "scan" / "run.json").exists()
    return {"rows": [rows.get(step, 0) for step in range(1, steps + 1)]}
