"""The ranks' side of the tests of runs that end by an error: what is saved first, and what must not be."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.checkpoint import files
from mt_megatron.data.loader.datasets import Datasets
from mt_megatron.errors import CheckpointError, DataError
from mt_megatron.training import loop, step
from tests.parity.case import Chain
from tests.resume.loading import flip
from tests.second_lane import DAILY
from tests.training.faults import injected
from tests.training.loop_cases import run, start

SMALL = (
    f"--num-layers 2 --global-batch-size 4 --micro-batch-size {1 if DAILY else 2} --eval-iters 0 "
    "--hidden-dropout 0.1"
)
NAN = {"module": "decoder.layers.0.mlp", "kind": "forward", "value": "nan", "rank": 1}


def all_cases(folder: str) -> dict[str, Any]:
    """Every case is a run of six steps with ``--save`` and no interval unless its flags say otherwise."""
    start()
    found: dict[str, Any] = {"ranks": dist.get_world_size()}

    def case(name: str, flags: str = "", *, save: str | None = None) -> dict[str, Any]:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            flags = f"{SMALL} --save {folder}/{save or name} {flags}"
            result = run(flags, folder, name)
        there = [each.name for each in files.complete_checkpoints(Path(folder) / (save or name))]
        found[name] = {**result, "there": there, "said": output.getvalue()}
        return result

    case("whole")
    with injected({**NAN, "steps": [4]}):
        case("diverged")
    case("diverged_then", save="diverged")
    with raising(4, lambda rank: DataError("all ranks meet it")):
        case("shared")
    case("shared_then", save="shared")
    with raising(4, _of_its_own):
        case("not_shared")
    with half_updated(4):
        case("half")
    with slow("written", 0.7), raising(5, lambda rank: DataError("all ranks meet it")):
        case("in_flight", "--save-interval 3 --async-save")
    with slow("manifest", 2.0), raising(6, _of_its_own, pause=0.5):
        case("published_alone", "--save-interval 3 --async-save")
    with spoilt_weight(4):
        case("not_finite", "--save-interval 2 --save-keep-last 1 --no-check-for-nan-in-grad")
    with injected({**NAN, "steps": [5]}):
        case("not_proven", "--save-interval 2 --save-keep-last 1")
    case("proven", "--save-interval 2 --save-keep-last 1")
    with damaged_when_published(6):
        case("read_back", "--save-interval 3 --save-keep-last 1")
    case("by_the_clock", "--save-interval-in-mins 0.00001 --train-iters 3")
    loop_build = loop.build_datasets
    loop.build_datasets = lambda *args, **kwargs: Datasets(Chain(7, 15), None, None)
    case("too_little_data")
    loop.build_datasets = loop_build
    return found


def _of_its_own(rank: int) -> Exception:
    return CheckpointError("of rank 1") if rank else DataError("of rank 0")


@contextmanager
def raising(at: int, error: Callable[[int], Exception], pause: float = 0.0) -> Iterator[None]:
    """The forward pass of step ``at`` raises what ``error`` makes for the rank; the two steps before it
    take ``pause`` seconds longer, in which files are written."""
    original, count = step.forward_backward, [0]

    def forward_backward(*args: Any) -> Any:
        count[0] += 1
        reports = original(*args)
        if at - 2 <= count[0] < at:
            time.sleep(pause)
        if count[0] == at:
            raise error(dist.get_rank())
        return reports

    step.forward_backward = forward_backward
    try:
        yield
    finally:
        step.forward_backward = original


@contextmanager
def half_updated(at: int) -> Iterator[None]:
    """The update of step ``at`` raises after the optimizer's."""
    original, count = step.update_expert_bias, [0]

    def update_expert_bias(chunks: Any) -> None:
        count[0] += 1
        if count[0] == at:
            raise DataError("half of it is done")
        original(chunks)

    step.update_expert_bias = update_expert_bias
    try:
        yield
    finally:
        step.update_expert_bias = original


@contextmanager
def spoilt_weight(at: int) -> Iterator[None]:
    """The update of step ``at`` leaves one weight infinite, as one that overflows does."""
    original, count = step.update_expert_bias, [0]

    def update_expert_bias(chunks: Any) -> None:
        count[0] += 1
        if count[0] == at:
            with torch.no_grad():
                dict(chunks[0].named_parameters())["module.decoder.final_layernorm.weight"][3] = float("inf")
        original(chunks)

    step.update_expert_bias = update_expert_bias
    try:
        yield
    finally:
        step.update_expert_bias = original


@contextmanager
def slow(point: str, seconds: float) -> Iterator[None]:
    """A save takes its time at ``point``."""
    files.reached_point = lambda name: time.sleep(seconds) if name == point else None
    try:
        yield
    finally:
        files.reached_point = None


@contextmanager
def damaged_when_published(iteration: int) -> Iterator[None]:
    """A byte of the checkpoint of ``iteration`` changes as soon as it is complete."""
    original = files.publish

    def publish(partial: Path, final: Path, owner: str) -> list[str]:
        lines = original(partial, final, owner)
        if files.iteration_of(final) == iteration:
            flip(final / "__0_0.distcp", 5000)
        return lines

    files.publish = publish
    try:
        yield
    finally:
        files.publish = original
