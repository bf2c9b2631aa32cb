"""Validation: the same tokens every time, each counted exactly once whatever the layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_megatron.checkpoint.run_parts import synchronised_parameters
from mt_megatron.data.loader.batches import valid_batches, valid_rounds
from mt_megatron.data.loader.datasets import SampleDataset
from mt_megatron.errors import DataError
from mt_megatron.seams.schedule import ForwardStep, run_schedule
from mt_megatron.training.distributed import Job
from mt_megatron.training.model import Trainable
from mt_megatron.training.step import Shape, summed


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Cross-entropy over validation tokens, the same on every rank."""

    loss: float
    """Nats per token."""

    tokens: int
    """How many tokens that mean is over."""


def evaluate(
    trainable: Trainable,
    forward_step: ForwardStep,
    dataset: SampleDataset,
    shape: Shape,
    job: Job,
    *,
    max_samples: int | None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Validation:
    """Cross-entropy over the first ``max_samples`` samples (None: all) of ``dataset``; collective.

    ``advance`` is called before each global batch, with how many are done and how many there are.
    Changes no random state and leaves the model in training mode.
    """
    rounds = valid_rounds(
        dataset,
        micro_batch_size=shape.micro_batch_size,
        data_parallel_size=job.layout.dp,
        max_samples=max_samples,
    )
    steps = -(-rounds // shape.num_microbatches)
    batches = [
        _padded(
            valid_batches(
                dataset,
                micro_batch_size=shape.micro_batch_size,
                data_parallel_rank=job.at.dp,
                data_parallel_size=job.layout.dp,
                max_samples=max_samples,
            ),
            steps * shape.num_microbatches,
        )
        for _ in trainable.chunks
    ]
    total = [0.0, 0.0]
    with _evaluating(trainable):
        for step in range(steps):
            advance(step, steps)
            reports = run_schedule(
                forward_step,
                trainable.chunks,
                batches,
                num_microbatches=shape.num_microbatches,
                seq_length=shape.seq_length,
                micro_batch_size=shape.micro_batch_size,
                forward_only=True,
            )
            total = [a + b for a, b in zip(total, summed(reports, job), strict=True)]
    loss, tokens = job.sum_over_ranks(total)
    if tokens == 0:
        raise DataError("validation counted no token; give more validation data or a larger --eval-iters")
    return Validation(loss=loss / tokens, tokens=round(tokens))


def _padded(batches: Iterator[dict[str, Tensor]], count: int) -> Iterator[dict[str, Tensor]]:
    """``count`` micro-batches: schedules want whole groups, so the end repeats one that counts nothing."""
    last: dict[str, Tensor] = {}
    for last in itertools.islice(batches, count):
        count -= 1
        yield last
    last = {**last, "loss_mask": torch.zeros_like(last["loss_mask"])}
    yield from itertools.repeat(last, count)


@contextmanager
def _evaluating(trainable: Trainable) -> Iterator[None]:
    with synchronised_parameters(trainable), torch.no_grad():
        for chunk in trainable.chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in trainable.chunks:
                chunk.train()
