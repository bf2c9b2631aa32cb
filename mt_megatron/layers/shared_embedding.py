"""Weights that the first and the last pipeline stage share while both are on one rank (stages in a V).

Elsewhere the two stages exchange them over the embedding group. Here the group has one member: the last
stage's copy is made from the chunk that was built before, and gradients are added up in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mt_megatron.errors import MtMegatronError

_first: weakref.ref[Any] | None = None


def remember_first(model: Any) -> None:
    """``model`` is this rank's chunk with the embedding."""
    global _first
    _first = weakref.ref(model)


def first_chunk() -> Any:
    """What ``remember_first`` was given; raises MtMegatronError where it is gone."""
    found = None if _first is None else _first()
    if found is None:
        raise MtMegatronError(
            "the last pipeline stage shares the first one's embedding, and the first was not built on this "
            "rank before, or is gone; build the chunks of a rank in order and keep them"
        )
    return found


def copy_weights(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set the second of each pair to the first."""
    with torch.no_grad():
        for source, target in pairs:
            target.copy_(source)


def sum_gradients(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Set ``main_grad`` of both parameters of each pair to the sum of theirs."""
    for one, other in pairs:
        one.main_grad.add_(other.main_grad)
        other.main_grad.copy_(one.main_grad)
