"""One optimizer step: micro-batches through the schedule, the loss agreed on by all ranks, the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mt_megatron.errors import DataError
from mt_megatron.layers.moe.expert_bias import update_expert_bias
from mt_megatron.seams import events
from mt_megatron.seams.family import ModelFamily
from mt_megatron.seams.schedule import ForwardStep, LossFunction, run_schedule
from mt_megatron.training.depth_losses import depth_means, depth_sums, forget
from mt_megatron.training.distributed import Job
from mt_megatron.training.health.divergence import DivergenceWatch, Judgement
from mt_megatron.training.lr import learning_rate
from mt_megatron.training.model import Trainable
from mt_megatron.training.update import (
    clip_and_apply,
    gradient_norm,
    loss_scale_is_stuck,
    prepare,
    wants_norm,
)

Batches = Sequence[Iterator[dict[str, Tensor]]]
"""One iterator of micro-batches per model chunk, all yielding the same ones."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a step is cut up."""

    num_microbatches: int
    micro_batch_size: int
    seq_length: int

    def samples(self, job: Job) -> int:
        """Sequences of the global batch."""
        return self.num_microbatches * self.micro_batch_size * job.layout.dp


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What one rank wants the run to do after a step, or knows that the others must know."""

    stop: bool = False
    """End the run."""

    save_written: bool = False
    """This rank's part of the checkpoint being written is complete."""

    measure: bool = False
    """All ranks measure what they were asked to, after this step."""

    leave: bool = False
    """End the run because of a straggler; with ``stop``."""

    save: bool = False
    """Save a checkpoint after this step."""

    attend: bool = False
    """All ranks do what this run was commanded to, after this step."""


def no_wishes() -> Wishes:
    """Of a rank that wants nothing."""
    return Wishes()


@dataclass(frozen=True, kw_only=True)
class AgreedWishes:
    """The wishes of all ranks, the same on every one."""

    stop: bool
    """Any rank wants to end the run."""

    save_written: bool
    """All ranks have written their part."""

    measure: bool = False
    """Any rank wants to measure."""

    leave: bool = False
    """Any rank wants to end the run because of a straggler."""

    save: bool = False
    """Any rank wants to save a checkpoint."""

    attend: bool = False
    """Any rank was commanded something."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, the same on every rank."""

    loss: float
    """Cross-entropy per counted token over the global batch, in nats."""

    tokens: int
    """Counted tokens of the global batch."""

    samples: int
    """Sequences of the global batch."""

    grad_norm: float | None
    """Norm before clipping; None when nothing asked for it, and after an fp16 overflow."""

    lr: float
    """Learning rate of this step's update."""

    skipped: bool
    """Whether the update was left out: fp16 overflow, or the step diverged."""

    diverged: Judgement | None
    """What is wrong with the step; None when nothing is. An fp16 overflow alone is nothing wrong."""

    wishes: AgreedWishes
    """What all ranks together want."""

    depth_losses: tuple[float, ...] = ()
    """Multi-token prediction: each depth's cross-entropy per token that it counts, in nats. Sentence order:
    that of a sample."""


class StepObserver(Protocol):
    """Listener to a step on its way."""

    def gradients_ready(self) -> None:
        """Gradients are reduced and unscaled, not yet clipped; not after an fp16 overflow."""

    def updated(self, *, skipped: bool) -> None:
        """The update was made, or ``skipped`` on all ranks."""


class NoObserver:
    """Hears it and does nothing."""

    def gradients_ready(self) -> None:
        pass

    def updated(self, *, skipped: bool) -> None:
        pass


NO_OBSERVER = NoObserver()


def make_forward_step(family: ModelFamily, device: torch.device) -> ForwardStep:
    """A forward step that holds nothing but ``family`` and ``device``."""

    def forward_step(batches: Iterator[Any], model: torch.nn.Module) -> tuple[Tensor, LossFunction]:
        return family.loss(model, _next_batch(family, batches, device))

    return forward_step


def _next_batch(family: ModelFamily, batches: Iterator[Any], device: torch.device) -> dict[str, Any]:
    work = 0
    events.begin("data")
    try:
        batch = family.get_batch(batches, device)
        tokens = batch.get("tokens")
        work = 0 if tokens is None else tokens.numel()
        return batch
    finally:
        events.end("data", work=work)


def train_step(
    trainable: Trainable,
    forward_step: ForwardStep,
    batches: Batches,
    shape: Shape,
    job: Job,
    *,
    iteration: int,
    wishes: Callable[[], Wishes] = no_wishes,
    watch: DivergenceWatch | None = None,
    observer: StepObserver = NO_OBSERVER,
) -> StepResult:
    """Forward, backward, reduction, clipping and update for one global batch; collective.

    ``wishes`` is asked for this rank's just before they travel with the loss, in the one all-reduce it
    needs. The weights change only when every rank agrees that the step is sound:
    ``StepResult.diverged`` says what ``watch`` found otherwise. Raises ``DataError`` when no token counts.
    """
    watch = watch or DivergenceWatch()
    forget(trainable)
    reports = forward_backward(trainable, forward_step, batches, shape)
    optimizer, samples = trainable.optimizer, shape.samples(job)
    lr = learning_rate(optimizer)
    with events.span("optimizer", optimizer=type(optimizer).__name__):
        overflowed = prepare(optimizer)
        if not overflowed:
            observer.gradients_ready()
        norm = None
        if not overflowed and (watch.needs_norm or wants_norm(optimizer)):
            norm = gradient_norm(optimizer)
        sums = [*summed(reports, job), *depth_sums(trainable, reports, job)]
        agreed = _agree(sums, job, iteration, wishes(), overflowed, watch.norm_is_bad(norm))
        if agreed.overflowed:
            diverged = watch.overflowed(scale_is_stuck=loss_scale_is_stuck(optimizer))
        else:
            diverged = watch.judge(loss=agreed.loss, norm=norm, norm_is_bad=agreed.norm_is_bad)
        skipped = agreed.overflowed or diverged is not None
        if not skipped:
            trainable.update_is_half_done = True
            clip_and_apply(optimizer, norm)
            update_expert_bias(trainable.chunks)
        observer.updated(skipped=skipped)
    if not skipped:
        trainable.scheduler.step(samples)
        watch.mean.add(agreed.loss)
        trainable.update_is_half_done = False
    return StepResult(
        loss=agreed.loss,
        tokens=agreed.tokens,
        samples=samples,
        grad_norm=norm,
        lr=lr,
        skipped=skipped,
        diverged=diverged,
        wishes=agreed.wishes,
        depth_losses=agreed.depth_losses,
    )


def forward_backward(
    trainable: Trainable, forward_step: ForwardStep, batches: Batches, shape: Shape
) -> list[dict[str, Any]]:
    """Gradients of one global batch into the gradient buffers, reduced and final on return.

    Returns what the loss reported, one per micro-batch, on the last pipeline stage.
    """
    for chunk in trainable.chunks:
        chunk.zero_grad_buffer()
    trainable.optimizer.zero_grad()
    return run_schedule(
        forward_step,
        trainable.chunks,
        batches,
        num_microbatches=shape.num_microbatches,
        seq_length=shape.seq_length,
        micro_batch_size=shape.micro_batch_size,
    )


def summed(reports: list[dict[str, Any]], job: Job) -> list[float]:
    """Loss and tokens of this rank's ``reports``; zeros where the loss is another rank's to report."""
    if not job.reports_loss or not reports:
        return [0.0, 0.0]
    pairs = torch.stack([torch.stack([report["loss"], report["tokens"]]) for report in reports])
    # On the host, where sums can be float64 whatever the device has.
    loss, tokens = pairs.cpu().double().sum(dim=0).tolist()
    return [loss, tokens]


@dataclass(frozen=True, kw_only=True)
class _Agreed:
    loss: float
    tokens: int
    overflowed: bool
    norm_is_bad: bool
    wishes: AgreedWishes
    depth_losses: tuple[float, ...]


def _agree(
    sums: list[float],
    job: Job,
    iteration: int,
    wishes: Wishes,
    overflowed: bool,
    norm_is_bad: bool,
) -> _Agreed:
    said = (
        wishes.stop,
        wishes.save_written,
        overflowed,
        norm_is_bad,
        wishes.measure,
        wishes.leave,
        wishes.save,
        wishes.attend,
    )
    loss, tokens, *rest = job.sum_over_ranks([*sums, *map(float, said)])
    depths, counts = rest[: len(sums) - 2], rest[len(sums) - 2 :]
    if tokens == 0:
        raise DataError(
            f"iteration {iteration}: no token of the global batch counts towards the loss; check loss masks "
            "(--eod-mask-loss) and the data"
        )
    stop, written, overflows, bad_norms, measure, leave, save, attend = (round(count) for count in counts)
    return _Agreed(
        loss=loss / tokens,
        tokens=round(tokens),
        overflowed=overflows > 0,
        norm_is_bad=bad_norms > 0,
        wishes=AgreedWishes(
            stop=stop > 0,
            save_written=written == job.layout.world_size,
            measure=measure > 0,
            leave=leave > 0,
            save=save > 0,
            attend=attend > 0,
        ),
        depth_losses=depth_means(depths),
    )
