"""Losses beside that of the predicted tokens, from the last stage to every rank and the records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mt_megatron.training.distributed import Job
from mt_megatron.training.model import Trainable

if TYPE_CHECKING:
    from mt_megatron.training.step import StepResult


def forget(trainable: Trainable) -> None:
    """Drop what passes outside of a step have reported."""
    for block in _blocks(trainable):
        block.take_reported()


def depth_sums(trainable: Trainable, reports: Sequence[Mapping[str, Any]], job: Job) -> list[float]:
    """Sum of losses and counted tokens of each depth since the last call, one after the other; for a model
    that learns the order of sentences those of its samples, out of ``reports`` of the micro-batches.

    On every rank as many numbers, zeros where the loss is another rank's to report.
    """
    if getattr(trainable.bare_chunks()[0], "add_binary_head", False):
        orders = [report["order"].tolist() for report in reports if job.reports_loss]
        return [sum(column) for column in zip([0.0, 0.0], *orders, strict=True)]
    sums = [0.0] * (2 * (trainable.core.mtp_num_layers or 0))
    for block in _blocks(trainable):
        reported = block.take_reported()
        if reported is not None and job.reports_loss:
            sums = reported.flatten().tolist()
    return sums


def depth_means(sums: Sequence[float]) -> tuple[float, ...]:
    """Loss per counted token of each depth; NaN where none counted."""
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return tuple(loss / tokens if tokens else math.nan for loss, tokens in pairs)


def depth_values(results: Iterable[StepResult], *, sentence_order: bool) -> dict[str, float]:
    """``mtp_1_loss`` and so on, or ``sentence_order_loss``, for a record: means over the steps in which they
    are finite."""
    found = {}
    for depth, losses in enumerate(zip(*(result.depth_losses for result in results), strict=True), start=1):
        finite = [loss for loss in losses if math.isfinite(loss)]
        name = "sentence_order_loss" if sentence_order else f"mtp_{depth}_loss"
        found[name] = sum(finite) / len(finite) if finite else math.nan
    return found


def _blocks(trainable: Trainable) -> Iterator[Any]:
    for chunk in trainable.bare_chunks():
        block = getattr(chunk, "mtp", None)
        if block is not None:
            yield block
