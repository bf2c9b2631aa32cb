"""Norms of gradients, weights and updates of each kind of optimizer against copies of all weights."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.parity.case import DAILY, MODEL, OPTIMIZER
from tests.scope.watch.layouts import ZERO1

_PLAIN = f"{MODEL} {OPTIMIZER} --lr-warmup-iters 0 --untie-embeddings-and-output-weights"
FURTHER = {
    "fp16": f"{_PLAIN} --fp16 --initial-loss-scale 4096",
    "momentum": f"{_PLAIN} --optimizer sgd --sgd-momentum 0.9",
    "sgd": f"{_PLAIN} --optimizer sgd --sgd-momentum 0",
}
ONE = {
    "adamw": _PLAIN,
    "copied": f"{_PLAIN} COPIED",
    "bf16": f"{_PLAIN} --bf16",
    "fp16_overflow": f"{_PLAIN} --fp16 --initial-loss-scale 4294967296 --hysteresis 1",
    **(FURTHER if DAILY else {}),
}
ONE |= {f"deferred_{name}": flags for name, flags in ONE.items()}
ONE |= dict.fromkeys(("deferred_pieces", "deferred_steps on a device, pieces"), _PLAIN)
TWO = {"zero1_bf16": f"{_PLAIN} {ZERO1} --bf16", "zero1": f"{_PLAIN} {ZERO1}"} if DAILY else {}
TWO |= {f"deferred_{name}": flags for name, flags in TWO.items()}
RELATIVE = 1e-3


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    one: dict[str, Any] = run_ranks(1, "tests.scope.watch.norm_ranks:norms", ONE, timeout=120)[0]
    two: dict[str, Any] = (
        {} if not TWO else run_ranks(2, "tests.scope.watch.norm_ranks:norms", TWO, timeout=120)[0]
    )
    return {**one, **two}


@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_norms_are_those_of_copies(found: dict[str, Any], name: str) -> None:
    case = found[name]
    for statistic, expected in case["expected"].items():
        recorded = case["recorded"][statistic]
        # bf16 weights are compared as the optimizer keeps them, in fp32.
        assert recorded == pytest.approx(expected, rel=RELATIVE, abs=1e-9), statistic
    assert not case["lines"]


@pytest.mark.parametrize("way", ["", "deferred_"])
def test_a_skipped_update_is_zero(found: dict[str, Any], way: str) -> None:
    case = found[f"{way}fp16_overflow"]
    assert case["skipped"][0] and case["recorded"]["update_ratio"][0] == 0.0
    assert case["recorded"]["gradient_norm"][0] == -1.0, "gradients that overflowed have no norm"
