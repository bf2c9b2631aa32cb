"""Traced runs under a schedule with a fault from some step on: the ranks of the test of their diagnosis."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mt_megatron.config.parse import load_config
from mt_megatron.scan.drill.faults import parse_fault
from mt_megatron.scan.drill.inject import Injector
from mt_megatron.seams import events
from mt_megatron.training.loop import train
from mt_megatron.training.validate import validate
from tests.training.loop_cases import MODEL, TRAINING, start

FLAGS = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --seq-length 64 --micro-batch-size 1 "
    "--eval-iters 0 --lr 1e-5 --log-interval 1000 --hidden-dropout 0 --attention-dropout 0 --scan base"
)


def trained(folder: str, flags: str, steps: int, fault: str | None, from_step: int) -> None:
    """``steps`` steps, from ``from_step`` on with ``fault``, traced into ``folder``."""
    import mt_megatron

    start()
    injector = Injector(dist.get_rank(), Path(folder), mt_megatron.backend())

    def hear(phase: str, name: str, attrs: Mapping[str, Any]) -> None:
        if fault is not None and phase == "begin" and int(attrs["iteration"]) == from_step:
            injector.set([parse_fault(fault)])

    stop = events.subscribe(hear, ["step"])
    run = f"--train-iters {steps} --scan-dir {folder} --no-scan-alerts --scope off"
    config = load_config(f"{MODEL} {TRAINING} {FLAGS} {flags} {run}".split())
    validate(config, world_size=dist.get_world_size())
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(config)
    finally:
        stop()
        injector.close()
