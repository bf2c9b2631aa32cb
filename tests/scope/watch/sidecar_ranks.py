"""The rank's side: trainings whose sidecar, a real process, is stopped, slowed down or killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

import mt_megatron
from mt_megatron.config.parse import load_config
from mt_megatron.models.families import family_of
from mt_megatron.scope import session as sessions
from mt_megatron.scope.interfaces import Facts, Options
from mt_megatron.scope.sidecar.process import SidecarProcess
from mt_megatron.scope.watch.sender import Sender
from mt_megatron.training.distributed import joined, seed_everything
from mt_megatron.training.model import build
from mt_megatron.training.step import Shape, make_forward_step, train_step
from tests.parity.case import MICRO_BATCH, MODEL, OPTIMIZER, SEQUENCE
from tests.scope.watch.identity_ranks import hashed
from tests.scope.watch.ranks import Observed, batches_of, begin

KINDS = ("unwatched", "good", "frozen", "slow", "killed")
_MIB = 2**20
_FLAGS = f"{MODEL} {OPTIMIZER} --untie-embeddings-and-output-weights --seed 5 --mock-data"
_REQUESTS = tuple(f"{kind}@decoder.layers.*:samples=0-7" for kind in ("residual", "mlp", "qkv", "context"))
"""About 1.5 MiB a step."""


def trained_beside(folder: str, kinds: list[str], steps: int, queue_mib: float) -> dict[str, Any]:
    """For each of ``kinds`` of sidecar what came of ``steps`` steps after whatever happened to it, with a
    queue of ``queue_mib`` to it."""
    begin()
    # Sessions make their senders themselves.
    sessions.Sender = partial(Sender, most_bytes=round(queue_mib * _MIB))  # type: ignore[misc, assignment]
    return {kind: _trained(Path(folder) / kind, kind, steps) for kind in kinds}


def _trained(run: Path, kind: str, steps: int) -> dict[str, Any]:
    config = load_config(_FLAGS.split())
    lines: list[str] = []
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        seed_everything(5, job)
        session = sessions.Session(
            run,
            rank=0,
            layout=job.layout,
            backend=job.backend,
            chunks=trainable.chunks,
            optimizer=trainable.optimizer,
            options=Options(live=False, interval=1, watch=_REQUESTS),
            facts=Facts(micro_batch_size=MICRO_BATCH, seq_length=SEQUENCE, model={"name": "test"}),
            say=lines.append,
        )
        observed = Observed(session)
        if kind != "unwatched":
            session.start()
            _wait(lambda: session._outbox is not None and session._outbox.connected)
        batches = [batches_of(job, 5, steps)]
        shape = Shape(
            num_microbatches=config.num_microbatches(1), micro_batch_size=MICRO_BATCH, seq_length=SEQUENCE
        )
        forward_step = make_forward_step(family, job.backend.device(job.backend.current_device()))
        losses: list[str] = []

        def step(iteration: int) -> None:
            session.begin_step(iteration)
            result = train_step(
                trainable, forward_step, batches, shape, job, iteration=iteration, observer=observed
            )
            if kind != "unwatched":
                observed.end(iteration, result)
            losses.append(result.loss.hex())

        resident, most = psutil.Process().memory_info().rss, 0
        sidecar = session._sidecar
        with _ended(kind, sidecar.process if isinstance(sidecar, SidecarProcess) else None):
            for iteration in range(1, steps + 1):
                step(iteration)
                most = max(most, psutil.Process().memory_info().rss - resident)
            dropped = session.dropped
        session.close()
        weights = [each.detach() for each in trainable.bare_chunks()[0].parameters()]
    return {
        "losses": losses,
        "bits": hashed([*weights, torch.get_rng_state()]),
        "growth_mib": most / _MIB,
        "dropped": dropped,
        "lines": lines,
    }


@contextmanager
def _ended(kind: str, process: Any) -> Iterator[None]:
    """Within it the sidecar is what ``kind`` says; a stopped one goes on afterwards."""
    over = threading.Event()

    def slow() -> None:
        # It runs for 2 ms of each half second: less than any machine trains meanwhile.
        while not over.is_set():
            os.kill(process.pid, signal.SIGSTOP)
            over.wait(0.5)
            os.kill(process.pid, signal.SIGCONT)
            over.wait(0.002)

    slowing = threading.Thread(target=slow, daemon=True)
    if kind == "frozen":
        os.kill(process.pid, signal.SIGSTOP)
    elif kind == "killed":
        os.kill(process.pid, signal.SIGKILL)
    elif kind == "slow":
        slowing.start()
    try:
        yield
    finally:
        over.set()
        if slowing.is_alive():
            slowing.join()
        if kind == "frozen":
            os.kill(process.pid, signal.SIGCONT)


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
