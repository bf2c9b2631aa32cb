"""Recipes are data; what hardware refuses is refused on every backend."""

from __future__ import annotations

import dataclasses

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.fp8.recipe import (
    NATIVE,
    PRESETS,
    Cast,
    Product,
    Recipe,
    possible_recipes,
    recipe_of,
    recipe_problems,
    require_possible,
)

BASE = PRESETS["tensorwise"]
E5M2, E4M3 = Cast(format="e5m2"), Cast(format="e4m3")
SQUARE = Cast(format="e4m3", granularity="block", block=(128, 128), power_of_2=True)


def test_presets_are_sound() -> None:
    assert [problem for recipe in PRESETS.values() for problem in recipe_problems(recipe)] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dgrad": Product(a=E5M2, b=E5M2)}, "e5m2 x e5m2"),
        ({"fprop": Product(a=SQUARE, b=SQUARE)}, "two-dimensional blocks"),
        ({"fprop": Product(a=E4M3, b=Cast(format="bf16"))}, "one operand is bf16"),
        ({"fprop": Product(a=Cast(format="e2m1"), b=E4M3)}, "e2m1 goes with e2m1"),
        ({"scaling": "delayed", "history": 0}, "history is 0"),
    ],
)
def test_what_hardware_refuses_is_refused(change: dict[str, object], says: str) -> None:
    recipe: Recipe = dataclasses.replace(BASE, **change)  # type: ignore[arg-type]
    assert any(says in problem for problem in recipe_problems(recipe))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": "blockwize"}, "expected one of delayed"),
        ({"name": "blockwise", "history": 16}, "fp8_amax_history_len with fp8_recipe blockwise"),
        ({"name": "blockwise", "format": "hybrid"}, "whose gradients are e4m3 1x128"),
        ({"name": "tensorwise", "format": "e3m4"}, "expected e4m3 or hybrid"),
        ({"name": "delayed", "algorithm": "mostrecent"}, "expected max or most_recent"),
    ],
)
def test_changes_without_a_place_are_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recipe_of(**given)  # type: ignore[arg-type]


def test_changes_that_have_one() -> None:
    assert recipe_of("tensorwise", format="e4m3").dgrad.a.format == "e4m3"
    assert recipe_of("delayed", history=16, algorithm="max", margin=1).history == 16
    assert not recipe_of("blockwise", wgrad=False).wgrad.quantised


def test_every_other_pair_of_recipe_and_device_is_refused_with_the_possible_ones() -> None:
    for row in NATIVE:
        for name in PRESETS:
            if name in possible_recipes(row.device, row.granularities):
                require_possible(name, row.device, row.granularities)
                continue
            with pytest.raises(ConfigError, match="Possible pairs: .*on cpu, emulated"):
                require_possible(name, row.device, row.granularities)
    assert possible_recipes("cpu", ()) == tuple(PRESETS)
    assert possible_recipes("musa", ()) == ()
    assert possible_recipes("musa", ("tensor", "row")) == (
        "delayed",
        "tensorwise",
        "rowwise",
        "rowwise_gw_hp",
    )
