"""Places of parameters and outputs in whole tensors, and the elements that indices and heads mean there,
without ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mt_megatron.errors import ConfigError
from mt_megatron.scope.lab.placement import ParameterPlace
from mt_megatron.scope.lab.preview import items_of
from mt_megatron.scope.lab.specification import perturbation_from
from mt_megatron.scope.lab.targets import ParameterTarget

EXPERTS, ROWS, COLUMNS = 6, 4, 3


def _grouped(rank: int, before: tuple[tuple[int, int], ...], name: str) -> ParameterPlace:
    """Half of the experts in one parameter, which a checkpoint takes apart into theirs; ``before``: place and
    size of each axis before the experts'."""
    here = EXPERTS // 2
    parameter = nn.Parameter(torch.zeros(here, ROWS, COLUMNS))

    def build(key: str, data: torch.Tensor, *ignored: Any) -> list[Any]:
        return [_piece(data[expert], (*before, (rank * here + expert, EXPERTS))) for expert in range(here)]

    return ParameterPlace(name, parameter, _factory(parameter, build))


def _piece(data: torch.Tensor, before: tuple[tuple[int, int], ...]) -> Any:
    """A sharded tensor that is whole along its own axes, as ``ShardedTensor.from_rank_offsets`` makes it."""
    return SimpleNamespace(
        data=data,
        global_shape=(*(size for _, size in before), *data.shape),
        global_offset=(*(at for at, _ in before), *(0 for _ in data.shape)),
        prepend_axis_num=len(before),
    )


def _factory(parameter: nn.Parameter, build: Callable[..., list[Any]]) -> Any:
    return SimpleNamespace(data=parameter, key="w", build_fn=build, replica_id=0, flattened_range=None)


def _plain(name: str, before: tuple[tuple[int, int], ...]) -> tuple[nn.Parameter, ParameterPlace]:
    """A matrix below axes of which ``before`` has each one's place and size."""
    parameter = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    return parameter, ParameterPlace(name, parameter, _piece(parameter.data, before))


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("decoder.layers.1.mlp.experts.weight1", ()),
        ("mtp.layers.0.transformer_layer.mlp.experts.weight1", ()),
        ("decoder.layers.1.mlp.experts.weight1", ((1, 5),)),
    ],
    ids=["layers that differ", "prediction depth", "layers that are stacked"],
)
def test_every_expert_has_places_of_its_own(name: str, before: tuple[tuple[int, int], ...]) -> None:
    places = [_grouped(rank, before, name) for rank in (0, 1)]
    assert [each.shape() for each in places] == [(EXPERTS, ROWS, COLUMNS)] * 2
    together = torch.cat([each.places().all() for each in places])
    assert torch.equal(together, torch.arange(EXPERTS * ROWS * COLUMNS))


def test_an_axis_of_experts_within_the_data_is_none_before_it() -> None:
    """Upstream's ``GroupedMLP`` holds two axes, and gives a checkpoint three."""
    parameter = nn.Parameter(torch.zeros(COLUMNS, EXPERTS * ROWS))

    def build(key: str, data: torch.Tensor, *ignored: Any) -> list[Any]:
        return [_piece(data.view(EXPERTS, COLUMNS, ROWS).transpose(1, 2), ((1, 5),))]

    name = "decoder.layers.1.mlp.experts.weight1"
    place = ParameterPlace(name, parameter, _factory(parameter, build))
    assert place.shape() == (EXPERTS, ROWS, COLUMNS)
    assert torch.equal(place.places().all().sort().values, torch.arange(EXPERTS * ROWS * COLUMNS))


def test_shared_experts_are_no_experts_of_many() -> None:
    name = "decoder.layers.1.mlp.shared_experts.linear_fc1.weight"
    for before in ((), ((1, 5),)):
        _, place = _plain(name, before)
        assert place.shape() == (ROWS, COLUMNS)
        assert torch.equal(place.places().all(), torch.arange(ROWS * COLUMNS))


def _target(path: str, before: tuple[tuple[int, int], ...]) -> ParameterTarget:
    parameter, place = _plain(path, before)
    return ParameterTarget(path=path, parameter=parameter, place=place, shape=place.shape(), along=None)


def _masked(target: ParameterTarget, index: list[int]) -> list[int]:
    one = perturbation_from({"kind": "mask", "on": "weight", "module": "*", "index": [index]})
    wanted = target.selection(one)[1].places
    assert wanted is not None
    return [int(place) for place in wanted]


def test_an_index_has_a_number_for_each_axis() -> None:
    linear = _target("decoder.layers.0.mlp.linear_fc1.weight", ((0, 5),))
    assert _masked(linear, [2, 1]) == [2 * COLUMNS + 1]
    for wrong in ([2], [0, 2, 1]):
        with pytest.raises(
            ConfigError, match=re.escape(f"{wrong} of {linear.path}; expected 2 numbers, shape [4, 3]")
        ):
            _masked(linear, wrong)
    with pytest.raises(ConfigError, match=re.escape("expected one within shape [4, 3]")):
        _masked(linear, [4, 0])


def test_the_number_of_an_expert_may_be_left_to_its_path() -> None:
    path = "decoder.layers.1.mlp.experts.local_experts.4.linear_fc1.weight"
    expert = _target(path, ((4, EXPERTS),))
    flat = (4 * ROWS + 2) * COLUMNS + 1
    assert _masked(expert, [2, 1]) == _masked(expert, [4, 2, 1]) == [flat]
    with pytest.raises(ConfigError, match=re.escape("shape [6, 4, 3], or 2 without the expert's")):
        _masked(expert, [1])
    one = perturbation_from({"kind": "mask", "on": "weight", "module": "*"})
    (item,) = items_of(one, [expert])
    assert item["elements"] == ROWS * COLUMNS, "one expert's"
