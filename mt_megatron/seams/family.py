"""A model family: the five functions by which the trainer knows one kind of model from another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ConfigError
from .layout import RankLayout


class ModelFamily(Protocol):
    """Five functions (an instance, a module or a namespace has them). ``config`` is the training
    configuration; a family reads only the parts it needs."""

    def build_model(self, config: Any, layout: RankLayout) -> list[torch.nn.Module]:
        """This rank's model chunks, on the host or the current device, not wrapped in DDP."""

    def get_batch(self, iterator: Iterator[Any]) -> dict[str, Tensor]:
        """The next micro-batch as named tensors, each (micro batch, sequence) or wider."""

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar to differentiate and what to report, from the last stage's output."""

    def flops(self, config: Any) -> float:
        """Floating-point operations of forward and backward for one token, without recomputation."""

    def convert_table(self, config: Any) -> Mapping[str, Any]:
        """Megatron parameter name -> where it comes from in the published checkpoint."""


_families: dict[str, ModelFamily] = {}


def register(name: str, family: ModelFamily) -> None:
    """Make ``family`` known as ``name``. Raises ConfigError when another one has the name."""
    if _families.setdefault(name, family) is not family:
        raise ConfigError(f"the model family {name!r} is already registered as {_families[name]!r}; choose another name")


def get(name: str) -> ModelFamily:
    """The family registered as ``name``. Raises ConfigError that lists the known ones."""
    try:
        return _families[name]
    except KeyError:
        known = ", ".join(sorted(_families)) or "none; import the module that registers it"
        raise ConfigError(f"unknown model family {name!r}; registered: {known}") from None
