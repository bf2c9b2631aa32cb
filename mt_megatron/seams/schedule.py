"""One call that runs the micro-batches of a step; which schedule runs them is exchangeable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ConfigError

LossFunction = Callable[[Tensor], tuple[Any, ...]]
"""Output tensor of the last stage -> (loss to differentiate, what to report), or, when losses are
weighed by token over the global batch, (sum of losses, number of tokens, what to report)."""


class ForwardStep(Protocol):
    """One micro-batch through one model chunk. Everything it needs comes in as an argument or was
    bound to it when it was made; it may run for any chunk, in any order, more than once."""

    def __call__(self, batches: Iterator[Any], model: torch.nn.Module) -> tuple[Tensor, LossFunction]: ...


class Schedule(Protocol):
    """What ``set_schedule`` takes; the arguments are those of ``run_schedule``."""

    def __call__(
        self,
        forward_step: ForwardStep,
        model_chunks: Sequence[torch.nn.Module],
        batches: Sequence[Iterator[Any]],
        *,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool,
    ) -> list[Any]: ...


def run_schedule(
    forward_step: ForwardStep,
    model_chunks: Sequence[torch.nn.Module],
    batches: Iterator[Any] | Sequence[Iterator[Any]],
    *,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
) -> list[Any]:
    """Run ``num_microbatches`` micro-batches forward, and backward unless ``forward_only``.

    ``batches`` has one iterator per model chunk (each chunk reads every micro-batch for itself);
    one iterator will do for one chunk. Returns what the loss function reports, one per
    micro-batch, on the last pipeline stage, and an empty list elsewhere. Raises ConfigError when
    the number of iterators is wrong.
    """
    iterators = list(batches) if isinstance(batches, Sequence) else [batches]
    if len(iterators) != len(model_chunks):
        raise ConfigError(
            f"found {len(iterators)} batch iterator(s) for {len(model_chunks)} model chunk(s); "
            "give one iterator per chunk, all yielding the same micro-batches"
        )
    global _microbatches
    _microbatches = num_microbatches
    try:
        return _schedule(
            forward_step,
            model_chunks,
            iterators,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
        )
    finally:
        _microbatches = None


def microbatches_of_this_step() -> int | None:
    """How many micro-batches ``run_schedule`` was told to run; None outside of it."""
    return _microbatches


def megatron_schedule(
    forward_step: ForwardStep,
    model_chunks: Sequence[torch.nn.Module],
    batches: Sequence[Iterator[Any]],
    *,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool,
) -> list[Any]:
    """Megatron-Core's own choice: no pipelining, 1F1B or interleaved 1F1B, by its parallel state."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    reported: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(batches),
        model=list(model_chunks),
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
    )
    return reported


_schedule: Schedule = megatron_schedule
_microbatches: int | None = None


def set_schedule(schedule: Schedule | None) -> None:
    """Run steps by ``schedule`` from now on; None goes back to ``megatron_schedule``."""
    global _schedule
    _schedule = megatron_schedule if schedule is None else schedule
