"""A model family: the five functions by which the trainer knows one kind of model from another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from mt_megatron.parallel.rank_layout import RankLayout

from ..errors import ConfigError
from .schedule import LossFunction


class ModelFamily(Protocol):
    """Five functions (an instance, a module or a namespace has them). ``config`` is the training
    configuration; a family reads only the parts it needs."""

    def build_model(self, config: Any, layout: RankLayout) -> list[torch.nn.Module]:
        """This rank's model chunks, on the host or the current device, not wrapped in DDP."""

    def get_batch(self, iterator: Iterator[dict[str, Tensor]], device: torch.device) -> dict[str, Any]:
        """The next micro-batch on ``device`` by name, tensors (micro batch, sequence) or wider."""

    def loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> tuple[Tensor, LossFunction]:
        """Run one chunk forward: its output, and what makes the last stage's output into a loss."""

    def flops(self, config: Any) -> float:
        """Floating-point operations of forward and backward for one token, without recomputation."""

    def convert_table(self, config: Any) -> Any:
        """How parameters are called and packed in the published checkpoint, as a table."""


_families: dict[str, ModelFamily] = {}


def register(name: str, family: ModelFamily) -> None:
    """Make ``family`` known as ``name``. Raises ConfigError when another one has the name."""
    if _families.setdefault(name, family) is not family:
        raise ConfigError(
            f"the model family {name!r} is already registered as {_families[name]!r}; choose another name"
        )


def get(name: str) -> ModelFamily:
    """The family registered as ``name``. Raises ConfigError that lists the known ones."""
    try:
        return _families[name]
    except KeyError:
        known = ", ".join(sorted(_families)) or "none; import the module that registers it"
        raise ConfigError(f"unknown model family {name!r}; registered: {known}") from None
