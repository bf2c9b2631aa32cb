"""Interfaces of a run for checkpoints: its process, and its training state. ``training`` implements both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from mt_megatron.backends.base import Backend
from mt_megatron.parallel.rank_layout import Coordinates, RankLayout


class Job(Protocol):
    """This process within the run; ``training.distributed.Job`` is one."""

    @property
    def backend(self) -> Backend:
        """The device's backend."""

    @property
    def layout(self) -> RankLayout:
        """Sizes of all parallel axes."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    def at(self) -> Coordinates:
        """Position of ``rank`` on every axis."""

    @property
    def is_main(self) -> bool:
        """True on rank 0."""

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Element-wise sum over all ranks; collective."""

    def agree(self, failure: BaseException | None) -> str | None:
        """Rank 0's failure as text on every rank; collective."""


class Trainable(Protocol):
    """This rank's part of model and optimizer; ``training.model.Trainable`` is one."""

    chunks: list[Any]
    core: Any
    optimizer: Any
    scheduler: Any
    update_is_half_done: bool

    def bare_chunks(self) -> list[torch.nn.Module]:
        """The chunks without their wrappers."""


@contextmanager
def synchronised_parameters(trainable: Trainable) -> Iterator[None]:
    """Every parameter complete on every rank, also when gathers overlap with the forward pass."""
    overlapping: list[Any] = [
        chunk for chunk in trainable.chunks if getattr(chunk, "use_forward_hook", False)
    ]
    for chunk in overlapping:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in overlapping:
            chunk.enable_forward_pre_hook()
