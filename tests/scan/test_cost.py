"""The benchmark of the cost says what it was told: a slow-down is found, a restless machine is admitted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import scan_cost

    yield scan_cost
    for name in ("scan_cost", "scan_event_cost", "recording"):
        if name not in before:
            sys.modules.pop(name, None)


def blocks(**slower: float) -> dict[str, list[list[float]]]:
    """Seconds of 200 rounds of two blocks; the machine drifts by a half and each block strays by 2 %."""
    rng = np.random.default_rng(0)
    drift = 1.0 + 0.5 * np.sin(np.linspace(0, 20, 200))[:, None]
    return {
        arm.replace("_", " "): (drift * (1 + by / 100) * rng.normal(1.0, 0.02, (200, 2))).tolist()
        for arm, by in slower.items()
    }


def test_a_slow_down_is_found_within_its_interval(cost: Any) -> None:
    measured = blocks(off=0.0, off_again=0.0, base=0.3, full=2.0)
    for arm, truth in (("off again", 0.0), ("base", 0.3), ("full", 2.0)):
        found = cost.difference(measured, arm)
        assert found["low"] < truth < found["high"] and found["high"] - found["low"] < 1.0
        assert found["pairs"] == 400


def test_outliers_do_not_decide(cost: Any) -> None:
    measured = blocks(off=0.0, base=0.3)
    measured["base"][7] = [50.0, 60.0]
    assert cost.difference(measured, "base")["percent"] < 1.0 < cost.difference(measured, "base")["mean"]


@pytest.mark.parametrize(
    ("control", "base", "high", "said"),
    [
        (0.1, 0.4, 0.7, "met"),
        (0.1, 0.4, 0.9, "missed"),
        (-0.1, 0.6, 0.7, "missed"),
        (0.4, 0.1, 0.2, "inconclusive: the control differs by +0.40 %"),
        (-0.4, 0.1, 0.2, "inconclusive: the control differs by -0.40 %"),
    ],
)
def test_the_verdict(cost: Any, control: float, base: float, high: float, said: str) -> None:
    found = {
        "off again": {"percent": control, "high": 1.0},
        "base": {"percent": base, "high": high},
        "full": {"percent": 2.9, "high": 9.0},
    }
    verdicts = cost.verdicts(found)
    assert verdicts["base"] == said
    assert verdicts["full"] == (said if said.startswith("inconclusive") else "met")
