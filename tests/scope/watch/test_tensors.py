"""Tensors of a step: several encoded at once are those encoded one by one; a device's copies are in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mt_megatron.scope.watch.host_copies import Copier
from mt_megatron.scope.watch.tensors import MOST_STEP, Tensors


def held(tensors: Tensors) -> list[dict[str, Any]]:
    return [{**each.about(), "data": [part.tolist() for part in each.tensors()]} for each in tensors.held]


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ((3, 5, 7), MOST_STEP),  # sent exactly
        ((3, 40, 130), MOST_STEP),
        ((3, 40, 130), 2 * 40 * (130 + 24)),  # room for two
        ((2, 3000, 1500), 2 * MOST_STEP),  # cut by rows
        ((0, 40, 130), MOST_STEP),
        ((3, 0, 130), MOST_STEP),
    ],
)
def test_several_at_once_are_those_one_by_one(shape: tuple[int, int, int], most: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if values.numel() > 10_000:
        values[1, 2, 3], values[-1, 0, 0] = torch.nan, torch.inf
    common: dict[str, Any] = {"microbatch": 0, "shape": shape[1:], "offset": (2, 0)}
    indices = [{"head": number} for number in range(shape[0])]
    one_by_one, at_once = Tensors(most), Tensors(most)
    for own, index in zip(values, indices, strict=True):
        one_by_one.add("a", "attention", own, index=index, **common)
    at_once.add_alike("a", "attention", values, indices=indices, **common)
    assert str(held(at_once)) == str(held(one_by_one))
    assert (at_once.size, at_once.dropped) == (one_by_one.size, one_by_one.dropped)


def test_copies_of_a_device_are_in_order() -> None:
    """One copy for each dtype."""
    backend: Any = SimpleNamespace(
        device_type="another", pins_host_memory=lambda: False, timed_event=lambda: None
    )
    given = [
        torch.arange(6.0).view(2, 3),
        torch.tensor(7, dtype=torch.uint8),
        torch.zeros(0, 4),
        torch.tensor([[8, 9]], dtype=torch.uint8).t(),
        torch.tensor(2.5),
    ]
    found = Copier(backend).copy(given)()
    assert [each.shape for each in found] == [tuple(each.shape) for each in given]
    assert [each.tolist() for each in found] == [each.tolist() for each in given]
    assert Copier(backend).copy([])() == []
