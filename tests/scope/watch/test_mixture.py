"""Latent attention, shared experts, groups of experts and prediction depths: every layout's values are those
of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.scope.watch.layouts import EP, PP, SP, TP, VPP, ZERO1

pytestmark = pytest.mark.daily

TWO = {
    "ep2_zero1": f"{EP} {ZERO1}",
    "pp2": PP,
    "vpp2": VPP,
    "tp2_sp": f"{TP} {SP}",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("mixture"))
    one: dict[str, Any] = run_ranks(1, "tests.scope.watch.mixture_ranks:values", folder, {"one": ""})[0]
    two: dict[str, Any] = run_ranks(2, "tests.scope.watch.mixture_ranks:values", folder, TWO, timeout=300)[0]
    return {**one, **two}


@pytest.mark.parametrize("name", TWO)
def test_values_are_those_of_one_process(found: dict[str, Any], name: str) -> None:
    one, other = found["one"]["values"], found[name]["values"]
    assert set(one) == set(other)
    wrong = [
        (key, other[key], value)
        for key, value in one.items()
        if not math.isclose(other[key], value, rel_tol=1e-3, abs_tol=1e-9)
    ]
    assert not wrong, f"{len(wrong)} of {len(one)}: {wrong[:6]}"
    for key, vector in found["one"]["vectors"].items():
        if key.endswith("|expert_load"):
            assert found[name]["vectors"][key] == vector
    assert found[name]["lines"] == []


def test_all_kinds_of_modules_are_there(found: dict[str, Any]) -> None:
    paths = {key.split("|")[1] for key in found["one"]["values"]}
    assert {"decoder.layers.1.mlp.router", "decoder.layers.3.self_attention", "embedding", ""} <= paths
    assert any(path.startswith("mtp.layers.0") for path in paths)
