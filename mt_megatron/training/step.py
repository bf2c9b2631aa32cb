"""One optimizer step: micro-batches through the schedule, the loss agreed on by all ranks, the update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_megatron.errors import MtMegatronError
from mt_megatron.seams import events
from mt_megatron.seams.family import ModelFamily
from mt_megatron.seams.schedule import ForwardStep, LossFunction, run_schedule
from mt_megatron.training.distributed import Job
from mt_megatron.training.lr import learning_rate
from mt_megatron.training.model import Trainable

_ADVICE = "Look at this iteration's data, lower --lr, or train in fp32 to see where it starts"

Batches = Sequence[Iterator[dict[str, Tensor]]]
"""One iterator of micro-batches per model chunk, all yielding the same ones."""


class NonFiniteLossError(MtMegatronError):
    """The loss or the gradient norm is NaN or infinite; the message names the iteration and the ranks."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a step is cut up."""

    num_microbatches: int
    micro_batch_size: int
    seq_length: int


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What one rank wants the run to do after a step, or knows that the others must know."""

    stop: bool = False
    """End the run."""

    save: bool = False
    """Write a checkpoint."""

    save_written: bool = False
    """This rank's part of the checkpoint being written is complete."""

    save_failed: bool = False
    """This rank's part of the checkpoint being written failed."""


NO_WISHES = Wishes()


@dataclass(frozen=True, kw_only=True)
class AgreedWishes:
    """The wishes of all ranks, the same on every one."""

    stop: bool
    """Any rank wants to end the run."""

    save: bool
    """Any rank wants a checkpoint."""

    save_written: bool
    """All ranks have written their part."""

    save_failed: bool
    """Any rank failed to write its part."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, the same on every rank."""

    loss: float
    """Cross-entropy per counted token over the global batch, in nats."""

    tokens: int
    """Counted tokens of the global batch."""

    grad_norm: float | None
    """Norm before clipping; None when clipping is off or the step was skipped."""

    lr: float
    """Learning rate of this step's update."""

    skipped: bool
    """Whether the update was left out (fp16 overflow)."""

    wishes: AgreedWishes
    """What all ranks together want."""


def make_forward_step(family: ModelFamily, device: torch.device) -> ForwardStep:
    """A forward step that holds nothing but ``family`` and ``device``."""

    def forward_step(batches: Iterator[Any], model: torch.nn.Module) -> tuple[Tensor, LossFunction]:
        with events.span("data"):
            batch = family.get_batch(batches, device)
        return family.loss(model, batch)

    return forward_step


def train_step(
    trainable: Trainable,
    forward_step: ForwardStep,
    batches: Batches,
    shape: Shape,
    job: Job,
    *,
    iteration: int,
    wishes: Wishes = NO_WISHES,
) -> StepResult:
    """Forward, backward, reduction, clipping and update for one global batch; collective.

    ``wishes`` are this rank's; they travel with the loss, in the one all-reduce it needs. Raises
    ``NonFiniteLossError`` before the weights are touched when the loss is not finite, and after the
    update when the gradient norm was not.
    """
    try:
        reports = forward_backward(trainable, forward_step, batches, shape)
    except AssertionError as error:
        # Megatron-Core's own check of gradients before they are reduced; it knows no iteration.
        if "NaN in local grad norm" not in str(error):
            raise
        raise NonFiniteLossError(
            f"iteration {iteration}: gradients are not finite on rank {job.rank}; the weights are unchanged "
            f"since the iteration before. {_ADVICE}"
        ) from error
    loss, tokens, agreed = _agree(reports, job, iteration, wishes)
    lr = learning_rate(trainable.optimizer)
    updated, grad_norm, _ = trainable.optimizer.step()
    if updated:
        trainable.scheduler.step(shape.num_microbatches * shape.micro_batch_size * job.layout.dp)
    norm = float(grad_norm) if updated and grad_norm is not None else None
    if norm is not None and not math.isfinite(norm):
        raise NonFiniteLossError(
            f"iteration {iteration}: the gradient norm is {norm} although the loss is {loss:.4f}; the "
            "weights are no longer usable: continue from the last checkpoint with a lower --lr or a longer "
            "warm-up"
        )
    return StepResult(loss=loss, tokens=tokens, grad_norm=norm, lr=lr, skipped=not updated, wishes=agreed)


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
    loss, tokens = pairs.sum(dim=0).tolist()
    return [loss, tokens]


def _agree(
    reports: list[dict[str, Any]], job: Job, iteration: int, wishes: Wishes
) -> tuple[float, int, AgreedWishes]:
    mine = summed(reports, job)
    said = [float(wish) for wish in (wishes.stop, wishes.save, wishes.save_written, wishes.save_failed)]
    loss, tokens, stops, saves, written, failed = job.sum_over_ranks([*mine, *said])
    if not math.isfinite(loss):
        ranks: list[int | None] = [None] * job.layout.world_size
        dist.all_gather_object(ranks, None if math.isfinite(mine[0]) else job.rank)
        culprits = [rank for rank in ranks if rank is not None]
        raise NonFiniteLossError(
            f"iteration {iteration}: the loss is {loss} on rank {', '.join(map(str, culprits))}; the weights "
            f"are unchanged since the iteration before. {_ADVICE}"
        )
    if tokens == 0:
        raise NonFiniteLossError(
            f"iteration {iteration}: no token of the global batch counts towards the loss; check loss masks "
            "(--eod-mask-loss) and the data"
        )
    agreed = AgreedWishes(
        stop=stops > 0,
        save=saves > 0,
        save_written=round(written) == job.layout.world_size,
        save_failed=failed > 0,
    )
    return loss / tokens, round(tokens), agreed
