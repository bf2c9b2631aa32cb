"""A tiny training with lab and control, driven step by step in the tests' rank processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.checkpoint.progress import Progress
from mt_megatron.checkpoint.rng import capture_rng
from mt_megatron.checkpoint.run_parts import synchronised_parameters
from mt_megatron.config.parse import load_config
from mt_megatron.config.rampup import batch_sizes
from mt_megatron.models.families import family_of
from mt_megatron.scope.control.control import Control
from mt_megatron.scope.lab.changes import parts_of
from mt_megatron.scope.lab.lab import Lab
from mt_megatron.training.distributed import joined
from mt_megatron.training.health.recovery import Recovery
from mt_megatron.training.health.watchdog import NoWatchdog
from mt_megatron.training.model import build
from mt_megatron.training.scope_trainer import ScopeTrainer
from mt_megatron.training.step import Shape, StepResult, Wishes, make_forward_step, no_wishes
from mt_megatron.training.steps import Steps
from tests.parity.case import MIXTURE, MODEL, SEQUENCE, VOCABULARY, Chain

SMALL = MODEL.replace("--num-layers 4", "--num-layers 2").replace("--hidden-size 64", "--hidden-size 32")
SMALL = SMALL.replace("--ffn-hidden-size 176", "--ffn-hidden-size 48")
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
TRAINING = (
    "--lr 1e-2 --train-iters 200 --micro-batch-size 1 --global-batch-size 4 --eval-iters 0 --mock-data "
    "--tokenizer-type NullTokenizer --num-workers 0 --scan off"
)
FLAGS = {"small": SMALL, "model": MODEL, "mixture": MIXTURE}


class Words:
    """A tokenizer whose text is numbers."""

    vocab_size = VOCABULARY
    eod = 0

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Bench:
    """One rank of a run."""

    def __init__(self, config: Any, job: Any, folder: Path | None) -> None:
        family = family_of(config)
        self.config, self.job = config, job
        self.said: list[str] = []
        self.frames: list[Any] = []
        self.trainable = build(config, job, family)
        self.shape = Shape(
            num_microbatches=config.num_microbatches(job.layout.world_size),
            micro_batch_size=config.train.micro_batch_size,
            seq_length=SEQUENCE,
        )
        self.step_function = make_forward_step(family, job.backend.device(job.backend.current_device()))
        size = config.global_batch_size(job.layout.world_size)
        self.steps = Steps(
            config,
            job,
            self.trainable,
            self.step_function,
            Chain(5, 200 * size),
            Progress(),
            shape=self.shape,
            sizes=batch_sizes(None, size),
            recovery=Recovery(config.train, say=self.said.append, record=lambda *values: None),
            roll_back=Progress,
            watchdog=NoWatchdog(),
        )
        self.trainer = ScopeTrainer(
            self.trainable, job, self.steps, self.shape, watchdog=NoWatchdog(), tokenizer=Words()
        )
        self.lab = Lab(self.trainer, folder=folder, say=self.said.append)
        self.control = Control(
            self.trainer,
            lab=self.lab,
            folder=folder,
            say=self.said.append,
            answer=self.frames.append,
            period=0.05,
        )

    def step(self) -> StepResult:
        """One step, as the trainer makes it, without anything that is attended to."""
        number = self.trainer.iteration + 1
        self.control.begin_step(number)
        result = self.steps.take(no_wishes)
        self.control.end_step(number)
        return result

    def run(self, until: int) -> list[float]:
        """Steps until ``until`` are done, with what comes between them; all losses, repeated ones too."""
        losses = []
        while self.trainer.iteration < until:
            number = self.trainer.iteration + 1
            self.control.begin_step(number)
            result = self.steps.take(lambda: Wishes(attend=self.control.wants_attention))
            losses.append(result.loss)
            self.control.end_step(number)
            if result.wishes.attend:
                self.control.attend()
        return losses

    def digest(self) -> str:
        """Of everything that training changes on this rank. Collective: parameters are gathered first."""
        found = hashlib.sha256()
        with synchronised_parameters(self.trainable):
            for tensor in _tensors(self):
                found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        states = capture_rng(self.job)
        found.update(repr([states["python"], states["numpy"][0], states["numpy"][2:]]).encode())
        for tensor in (states["numpy"][1], states["torch"], states["device"], *states["tracker"].values()):
            found.update(tensor.cpu().contiguous().numpy().tobytes())
        plain = {key: value for key, value in vars(self.trainable.scheduler).items() if key != "optimizer"}
        found.update(repr([plain, self.steps.progress]).encode())
        return found.hexdigest()


def _tensors(bench: Bench) -> Iterator[torch.Tensor]:
    for chunk in bench.trainable.chunks:
        yield from (parameter.data.flatten() for parameter in chunk.parameters())
        # Not ``buffers()``: upstream's wrapper has its own things by that name.
        for module in chunk.modules():
            yield from (each.flatten() for each in module._buffers.values() if each is not None)
    for part in parts_of(bench.trainable.optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter.data.flatten()
                state = part.optimizer.state.get(parameter, {})
                yield from (torch.as_tensor(value).flatten() for _, value in sorted(state.items()))
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None:
            yield scaler.scale.flatten()


def start() -> None:
    """Patch, and make one default group for all benches of this process."""
    mt_megatron.patch("cpu")
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")


@contextmanager
def bench(flags: str = "", *, model: str = "small", folder: str | None = None) -> Iterator[Bench]:
    """A run of this process; made from its seed each time."""
    config = load_config(f"{FLAGS[model]} {TRAINING} {flags}".split())
    with joined(config, mt_megatron.backend()) as job:
        made = Bench(config, job, None if folder is None else Path(folder))
        try:
            yield made
        finally:
            made.control.close()


def entry(**values: Any) -> dict[str, Any]:
    """A perturbation as a command gives it."""
    return {"perturbation": {"name": "p", **values}}


Case = Callable[[str], Any]
