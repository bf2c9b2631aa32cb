"""The ranks' side: short trainings that are watched, and what rank 0's reader was sent."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.backends.distributed.namespace import local_device, prepare_environment
from mt_megatron.checkpoint.load import Progress, load_weights
from mt_megatron.checkpoint.save import save_checkpoint
from mt_megatron.config.parse import load_config
from mt_megatron.data.loader.batches import train_batches
from mt_megatron.models.families import family_of
from mt_megatron.scope.format.frames import Decoder, encode
from mt_megatron.scope.interfaces import Facts, Options, StepFigures
from mt_megatron.scope.session import Session
from mt_megatron.scope.watch import parts
from mt_megatron.training.distributed import Job, joined
from mt_megatron.training.model import Trainable, build
from mt_megatron.training.step import Shape, make_forward_step, train_step
from tests.parity.case import GLOBAL_BATCH, MICRO_BATCH, SEQUENCE, Chain
from tests.scope.watch.layouts import by_name
from tests.scope.watch.reader import Reader

STEPS = 3


def begin() -> None:
    """Patch, and make one default group for all runs of this process."""
    mt_megatron.patch(os.environ.get("MT_MEGATRON_TEST_BACKEND", "cpu"))
    gc.freeze()
    backend = mt_megatron.backend()
    prepare_environment(backend, nodes=1)
    backend.set_device(local_device(backend))
    dist.init_process_group(backend.collective)


class Observed:
    """A session as ``Steps`` uses it."""

    def __init__(self, session: Session) -> None:
        self.gradients_ready = session.gradients_ready
        self.updated = session.updated
        self.session = session

    def begin(self, iteration: int) -> None:
        self.session.begin_step(iteration)

    def end(self, iteration: int, result: Any) -> None:
        figures = StepFigures(
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.tokens,
            skipped=result.skipped,
        )
        self.session.end_step(iteration, figures)


def train(
    flags: str,
    weights: Path,
    *,
    seed: int,
    watch: tuple[str, ...] = (),
    interval: int = 1,
    steps: int = STEPS,
) -> tuple[Reader | None, Any]:
    """Train ``steps`` from the weights in ``weights`` (made by the first who comes); rank 0's reader, and the
    results."""
    config = load_config([*flags.split(), "--seed", str(seed), "--mock-data"])
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        if not weights.exists() and job.layout.world_size == 1:
            save_checkpoint(weights, trainable, Progress(), job, manifest={})
            bare = trainable.bare_chunks()[0]
            named = {name: each.detach().cpu().clone() for name, each in bare.named_parameters()}
            torch.save(named, f"{weights}.pt")
        load_weights(weights / "iter_0000000", trainable)
        with watched(config, job, trainable, watch=watch, interval=interval) as (observed, reader):
            shape = Shape(
                num_microbatches=config.num_microbatches(job.layout.world_size),
                micro_batch_size=MICRO_BATCH,
                seq_length=SEQUENCE,
            )
            forward_step = make_forward_step(family, job.backend.device(job.backend.current_device()))
            batches = [batches_of(job, seed, steps) for _ in trainable.chunks]
            results = []
            for iteration in range(1, steps + 1):
                observed.begin(iteration)
                result = train_step(
                    trainable, forward_step, batches, shape, job, iteration=iteration, observer=observed
                )
                observed.end(iteration, result)
                results.append(result)
        dist.barrier()
    return reader, results


@contextmanager
def watched(
    config: Any, job: Job, trainable: Trainable, *, watch: tuple[str, ...] = (), interval: int = 1
) -> Iterator[tuple[Observed, Reader | None]]:
    """A session whose frames rank 0's reader takes."""
    reader = Reader() if job.rank == 0 else None
    lines: list[str] = []
    session = Session(
        "/nowhere",
        rank=job.rank,
        layout=job.layout,
        backend=job.backend,
        chunks=trainable.chunks,
        optimizer=trainable.optimizer,
        options=Options(live=False, interval=interval, watch=watch),
        facts=Facts(
            micro_batch_size=MICRO_BATCH,
            global_batch_size=config.global_batch_size(job.layout.world_size),
            seq_length=SEQUENCE,
            vocab_size=config.model.vocab_size,
            model={"name": "test"},
        ),
        say=lines.append if reader is None else reader.lines.append,
        sidecar=None if reader is None else reader.make,
    )
    session.start()
    try:
        yield Observed(session), reader
    finally:
        session.close()
        if reader is not None:
            reader.wait(job.layout.world_size)


def batches_of(job: Job, seed: int, steps: int) -> Any:
    """The micro-batches of this rank."""
    return train_batches(
        Chain(seed, steps * GLOBAL_BATCH),
        consumed_samples=0,
        micro_batch_size=MICRO_BATCH,
        data_parallel_rank=job.at.dp,
        data_parallel_size=job.layout.dp,
    )


WATCH = (
    "moments@decoder.layers.*",
    "moments@decoder.layers.*.self_attention.linear_qkv",
    "histogram@decoder.layers.*.mlp",
    "activation@embedding:tokens=3-20:samples=1,6",
    "activation@decoder.layers.0.mlp.linear_fc1:tokens=3-20:samples=1,6",
    "residual@decoder.layers.*:samples=1,6",
    "gradient@decoder.layers.*.mlp:samples=5:every=2",
    "qkv@decoder.layers.*:heads=1,2:samples=3",
    "context@decoder.layers.1:samples=3",
    "attention@decoder.layers.*.self_attention:heads=0,3:samples=2",
    "attention@decoder.layers.2:tokens=5-12:samples=7",
    "mlp@decoder.layers.0:samples=0",
    "router@decoder.layers.*:samples=0,7",
    "logits@output_layer:tokens=4-30:samples=0,7",
    "logits@decoder.layers.3:tokens=0-9:samples=4",
    "logits@decoder.layers.1:tokens=0-9:samples=0,5",
)
"""Requests of the runs that are compared with the oracle."""


def run_layouts(names: list[str], folder: str, seed: int) -> None:
    """Train every layout of ``names``; rank 0 writes what its reader was sent to ``NAME.frames``."""
    begin()
    for name in names:
        layout = by_name(name)
        weights = Path(folder) / layout.model
        with deferred() if layout.deferred else nullcontext():
            reader, results = train(layout.all_flags, weights, seed=seed, watch=WATCH)
        if reader is None:
            continue
        with (Path(folder) / f"{name}.frames").open("wb") as file:
            for rank, frames in reader.frames.items():
                for frame in frames:
                    file.write(encode({"k": "kept", "rank": rank, "frame": frame}))
            lines, norms = reader.lines, [result.grad_norm for result in results]
            losses = [result.loss for result in results]
            file.write(encode({"k": "lines", "lines": lines, "norms": norms, "losses": losses}))


@contextmanager
def deferred() -> Iterator[None]:
    """Statistics are made as on an accelerator, on the CPU."""
    kept = vars(parts)["defers"]
    parts.defers = lambda device: True
    try:
        yield
    finally:
        parts.defers = kept


def frames_of(path: Path) -> tuple[dict[int, list[dict[str, Any]]], dict[str, Any]]:
    """The frames by rank, and what rank 0 said, of a file of ``run_layouts``."""
    found: dict[int, list[dict[str, Any]]] = {}
    told: dict[str, Any] = {}
    for frame in Decoder().feed(path.read_bytes()):
        if frame["k"] == "lines":
            told = frame
        else:
            found.setdefault(int(frame["rank"]), []).append(frame["frame"])
    return found, told
