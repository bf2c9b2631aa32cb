"""What training changes on one rank: model chunks, optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(kw_only=True)
class Trainable:
    """Everything of this rank that training changes."""

    chunks: list[Any]
    """``DistributedDataParallel`` modules, one per virtual pipeline stage."""

    core: Any
    """The ``TransformerConfig`` all chunks share."""

    optimizer: Any
    """A ``MegatronOptimizer``."""

    scheduler: Any
    """An ``OptimizerParamScheduler``; it counts samples."""

    update_is_half_done: bool = False
    """Whether an update of the weights, or a load into them, was begun and has not ended."""

    def bare_chunks(self) -> list[torch.nn.Module]:
        """The chunks without their wrappers."""
        return [unwrapped(chunk) for chunk in self.chunks]

    def parameters_on_this_rank(self) -> int:
        """Number of parameter elements this rank holds."""
        return sum(p.numel() for chunk in self.chunks for p in chunk.parameters())


def unwrapped(module: Any) -> torch.nn.Module:
    """``module`` without DDP and precision wrappers."""
    while hasattr(module, "module"):
        module = module.module
    inner: torch.nn.Module = module
    return inner


@contextmanager
def synchronised_parameters(trainable: Trainable) -> Iterator[None]:
    """Every parameter complete on every rank, also when gathers overlap with the forward pass."""
    overlapping: list[Any] = [chunk for chunk in trainable.chunks if chunk.use_forward_hook]
    for chunk in overlapping:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in overlapping:
            chunk.enable_forward_pre_hook()
