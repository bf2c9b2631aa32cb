"""Execution order of modules: ranks hold parts of it, and names are whatever a model has."""

from __future__ import annotations

import random

import pytest

from mt_megatron.scope.recording.order import execution_order, layer_of, place_of

STAGES = (
    ["", "embedding", "decoder", "decoder.layers", "decoder.layers.0", "decoder.layers.1"],
    ["", "decoder", "decoder.layers", "decoder.layers.2", "decoder.final_layernorm", "output_layer"],
)


def test_stages_are_put_together_and_the_whole_model_comes_last() -> None:
    assert execution_order(STAGES) == [
        "embedding",
        *(f"decoder.layers.{layer}" for layer in range(3)),
        "decoder.layers",
        "decoder.final_layernorm",
        "decoder",
        "output_layer",
        "",
    ]


def test_the_whole_model_is_a_path_of_its_own() -> None:
    """Real ranks list it first; walking through the names must end."""
    assert execution_order([[""]]) == [""]
    assert execution_order([["", "a"], ["", "b"]]) == ["a", "b", ""]
    assert execution_order([["a", "a.b"]]) == ["a.b", "a"]


@pytest.mark.parametrize("path", [".", "..", ".a", "a.", "a..b", "...a.b", "0", "layers.x", "a.0.a"])
def test_odd_names_are_listed_once(path: str) -> None:
    found = execution_order([["", path, "a"], [path, "b"]])
    assert sorted(found) == sorted({"", path, "a", "b"})


def test_every_path_is_listed_once_whatever_the_ranks_hold() -> None:
    draw = random.Random(3)
    for _ in range(200):
        names = ["", "a", "b", "layers", "0", "1", "10", ""]
        paths = [".".join(draw.choices(names, k=draw.randint(1, 4))) for _ in range(12)]
        lists = [draw.sample(paths, 6) for _ in range(3)]
        found = execution_order(lists)
        assert sorted(found) == sorted({path for each in lists for path in each})


def test_layers_are_counted_through_the_whole_model() -> None:
    assert layer_of("decoder.layers.12.mlp") == 12 and layer_of("layers.0") == 0
    assert layer_of("decoder.layers") is None and layer_of("mylayers.3") is None


@pytest.mark.parametrize(
    ("path", "layer", "label"),
    [
        ("decoder.layers.3.mlp", 3, "3"),
        ("layers.0", 0, "0"),
        ("mtp.layers.0", None, "MTP 0"),
        ("mtp.layers.1.transformer_layer.mlp.router", None, "MTP 1"),
        ("output_layer", None, None),
    ],
)
def test_a_prediction_depth_is_no_layer(path: str, layer: int | None, label: str | None) -> None:
    place = place_of(path)
    assert layer_of(path) == layer and (None if place is None else place[1]) == label
