"""The ranks' side of the tests of what a whole run says and keeps."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mt_megatron.config.parse import load_config
from mt_megatron.errors import ConfigError, MtMegatronError
from mt_megatron.training import loop
from mt_megatron.training.logging import output
from mt_megatron.training.logging.metrics import Metrics, read_records
from mt_megatron.training.validate import validate
from tests.second_lane import DAILY
from tests.training.loop_cases import MODEL, TRAINING, start

TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


def said(flags: str) -> dict[str, Any]:
    """One run: its lines (rank 0), and the error it ended with."""
    lines, error = io.StringIO(), None
    with contextlib.redirect_stdout(lines):
        try:
            config = load_config(f"{MODEL} {TRAINING} {flags}".split())
            validate(config, world_size=dist.get_world_size())
            loop.train(config)
        except MtMegatronError as found:
            error = f"{type(found).__name__}: {found}"
    return {"lines": lines.getvalue().splitlines(), "error": error}


def runs(folder: str) -> dict[str, Any]:
    """Two ranks: a run that is resumed, a full disk, a failure, and records that cannot be opened."""
    start()
    board = f"--tensorboard-dir {folder}/tb" if TENSORBOARD else ""
    # As many samples, in half as many micro-batches in the first lane.
    fewer = "" if DAILY else "--micro-batch-size 4 --eval-iters 1"
    tensor = f"--tensor-model-parallel-size 2 --eval-interval 2 --peak-tflops 0.5 {fewer}"
    found = {
        "first": said(f"{tensor} --save {folder}/run --exit-interval 3 {board}"),
        "second": said(f"{tensor} --save {folder}/run {board}"),
        "full": said("--metrics-path /dev/full --train-iters 3"),
        "paced": said("--log-interval 100 --train-iters 6"),
        "left": said("--log-interval 100 --train-iters 6 --exit-interval 2"),
        "broken": broken(folder),
        "unopened": unopened(folder),
    }
    path = Path(folder) / "run" / "metrics.jsonl"
    found["records"] = read_records(path) if dist.get_rank() == 0 else []
    return found


def broken(folder: str) -> dict[str, Any]:
    """Every rank fails after its third step, before that is recorded."""
    original = output.Output.report

    def failing(self: Any, iteration: int, *args: Any) -> None:
        if iteration == 3:
            raise MtMegatronError("the third step failed")
        original(self, iteration, *args)

    output.Output.report = failing  # type: ignore[method-assign]
    try:
        return said(f"--save {folder}/broken --resume never")
    finally:
        output.Output.report = original  # type: ignore[method-assign]


def unopened(folder: str) -> dict[str, Any]:
    """Rank 0 alone finds out that it cannot write."""

    class Refused(Metrics):
        def __init__(self, path: Path | None) -> None:
            raise ConfigError("cannot append to it; change --metrics-path")

    output.Metrics = Refused  # type: ignore[misc]
    try:
        return said(f"--metrics-path {folder}/unopened.jsonl")
    finally:
        output.Metrics = Metrics  # type: ignore[misc]
