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
from mt_megatron.parallel.rank_layout import Coordinates, RankLayout
from mt_megatron.scope.lab.placement import Geometry, ParameterPlace, activation_places, features_of
from mt_megatron.scope.lab.preview import items_of
from mt_megatron.scope.lab.specification import perturbation_from
from mt_megatron.scope.lab.targets import ModuleTarget, ParameterTarget, _heads_along, module_targets
from mt_megatron.scope.lab.values import Places

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


# Transformer Engine's linears, as far as their classes' names and attributes matter.

HIDDEN, HEADS, GROUPS, HEAD = 8, 4, 2, 2
ROWS_OF_QKV = (HEADS + 2 * GROUPS) * HEAD


class _Linear(nn.Module):
    def __init__(self, out_features: int, config: Any) -> None:
        super().__init__()
        self.config, self.out_features = config, out_features
        self.weight = nn.Parameter(torch.zeros(out_features, HIDDEN))


class TELayerNormColumnParallelLinear(_Linear):
    """Holds its part of the rows, and the norm before it."""

    def __init__(self, out_features: int, config: Any) -> None:
        super().__init__(out_features // config.tensor_model_parallel_size, config)
        self.layer_norm_weight = nn.Parameter(torch.zeros(HIDDEN))


class TERowParallelLinear(_Linear):
    """Has all features of its output."""


def _config(tp: int) -> Any:
    return SimpleNamespace(
        tensor_model_parallel_size=tp,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        gated_linear_unit=True,
    )


def _geometry(tp: int, rank: int) -> Geometry:
    at = Coordinates(tp=rank, cp=0, ep=0, edp=0, dp=0, pp=0)
    layout = RankLayout(world_size=tp, tp=tp)
    return Geometry(layout=layout, at=at, seq_length=3, micro_batch_size=1, sequence_parallel=True)


def _outputs(name: str, module: nn.Module, features: int, tp: int) -> list[Places]:
    """Places of every rank's output of ``module``, which has ``features`` of its own."""
    path, output = f"decoder.layers.0.{name}", torch.zeros(3, 1, features)
    return [activation_places(module, path, output, 0, _geometry(tp, rank)) for rank in range(tp)]


@pytest.mark.parametrize(
    ("name", "size"),
    [("self_attention.linear_qkv", ROWS_OF_QKV), ("mlp.linear_fc1", 24)],
    ids=["qkv", "gated"],
)
def test_columns_of_fused_linears_are_parts_of_the_whole_output(name: str, size: int) -> None:
    module = TELayerNormColumnParallelLinear(size, _config(2))
    first, second = _outputs(name, module, size // 2, 2)
    assert first.shape == second.shape == (3, 1, size) and features_of(module) == size
    assert torch.equal(torch.cat([first.all(), second.all()]).sort().values, torch.arange(3 * size))
    gates = [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17] if "fc1" in name else list(range(size // 2))
    assert first.parts[2].tolist() == gates


def test_rows_of_fused_linears_give_whole_outputs() -> None:
    module = TERowParallelLinear(HIDDEN, _config(2))
    first, second = _outputs("mlp.linear_fc2", module, HIDDEN, 2)
    assert first.shape == (3, 1, HIDDEN) and torch.equal(first.all(), second.all())


def test_a_head_of_fused_columns_is_that_of_the_layer() -> None:
    path = "decoder.layers.0.self_attention.linear_qkv"
    module = TELayerNormColumnParallelLinear(ROWS_OF_QKV, _config(2))
    one = perturbation_from({"kind": "mask", "on": "activation", "module": "*.linear_qkv", "heads": [3]})
    (target,) = module_targets(one, [_nested(path, module)])
    chosen = []
    for places in _outputs("self_attention.linear_qkv", module, ROWS_OF_QKV // 2, 2):
        found = target.selection(one, places).chosen(0, places.all())
        assert found is not None
        chosen.append(found.view(3, -1).any(0).nonzero().flatten().tolist())
    # Rows are q0 q1 k0 v0 on the first rank, q2 q3 k1 v1 on the second.
    assert chosen == [[], [2, 3]]


def test_an_index_of_fused_columns_lies_within_the_whole_output() -> None:
    module = TELayerNormColumnParallelLinear(16, _config(2))
    target = ModuleTarget(path="linear_qkv", module=module, features=features_of(module), heads=None)
    given = {"kind": "mask", "on": "activation", "module": "linear_qkv"}
    target.require_index(perturbation_from({**given, "index": [2, 0, 15]}), 3)
    with pytest.raises(ConfigError, match="positions below 3 and features below 16"):
        target.require_index(perturbation_from({**given, "index": [2, 0, 16]}), 3)


def test_a_fused_norm_is_no_heads() -> None:
    owner = "decoder.layers.0.self_attention.linear_qkv"
    module = TELayerNormColumnParallelLinear(ROWS_OF_QKV, _config(1))
    along = _heads_along(f"{owner}.weight", module, (ROWS_OF_QKV, HIDDEN), [3])
    assert along.chosen.nonzero().flatten().tolist() == [10, 11]
    with pytest.raises(ConfigError, match=f"heads for {owner}.layer_norm_weight; .* such as {owner}.weight"):
        _heads_along(f"{owner}.layer_norm_weight", module, (HIDDEN,), [3])


def _nested(path: str, module: nn.Module) -> nn.Module:
    for name in reversed(path.split(".")):
        module = nn.ModuleDict({name: module})
    return module
