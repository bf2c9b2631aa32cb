"""The benchmark of the cost says what it was told: a slow-down is found, a restless machine is admitted."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.scan.record.writer import BEAT_SECONDS

_BEAT_NS = round(BEAT_SECONDS * 1e9)
BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks" / "scan"


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import scan_cost

    yield scan_cost
    for name in ("scan_cost", "scan_cost_held", "scan_event_cost", "paired_blocks", "recording"):
        if name not in before:
            sys.modules.pop(name, None)


def blocks(slower: float) -> np.ndarray:
    """Seconds of 400 blocks and of those around them: the machine drifts by a half, each strays by 2 %."""
    rng = np.random.default_rng(0)
    drift = 1.0 + 0.5 * np.sin(np.linspace(0, 20, 1200)).reshape(400, 3)
    took = drift * rng.normal(1.0, 0.02, (400, 3))
    took[:, 1] *= 1 + slower / 100
    return took


@pytest.mark.parametrize("truth", [0.0, 0.3, 2.0])
def test_a_slow_down_is_found_within_its_interval(cost: Any, truth: float) -> None:
    found = cost.difference(blocks(truth))
    assert found["low"] < truth < found["high"] and found["high"] - found["low"] < 0.7
    assert found["pairs"] == 400


def test_times_with_a_long_tail_make_no_slow_down(cost: Any) -> None:
    took = np.random.default_rng(1).lognormal(0.0, 0.3, (20_000, 3))
    assert abs(cost.difference(took)["percent"]) < 0.6
    beside_mean = 100 * (took[:, 1] / took[:, [0, 2]].mean(axis=1) - 1)
    assert float(np.median(beside_mean)) < -1.0, "the control: this is how not to do it"


def test_outliers_do_not_decide(cost: Any) -> None:
    measured = blocks(0.3)
    measured[7, 1] = 50.0
    assert cost.difference(measured)["percent"] < 1.0 < cost.difference(measured)["mean"]


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


def test_the_background_stands_still_while_it_is_held(cost: Any) -> None:
    from scan_cost_held import TracedTime

    clock = TracedTime()
    beats: list[tuple[int, int, int]] = []
    thread = threading.Thread(target=lambda: beats.extend(clock.rest() for _ in range(2)), daemon=True)
    thread.start()
    time.sleep(0.3)
    assert not beats, "it is not open yet"
    clock.open(at=_BEAT_NS // 4)
    clock.close()
    left = _BEAT_NS - clock._at
    time.sleep(0.3)
    assert not beats, "a quarter of the time until the first beat has passed"
    before = time.perf_counter_ns()
    clock.open()
    after = time.perf_counter_ns()
    thread.join(60)
    (number, planned, woke), (following, second, _) = beats
    assert (number, following) == (1, 2)
    assert before + left <= planned <= after + left and planned <= woke
    assert second > planned


def test_a_beat_comes_at_the_time_that_the_ranks_agreed_on(cost: Any) -> None:
    from scan_cost_held import TracedTime

    clock = TracedTime()
    before = time.perf_counter_ns()
    clock.open(at=50 * _BEAT_NS + _BEAT_NS * 2 // 3)
    after = time.perf_counter_ns()
    number, planned, woke = clock.rest()
    # The next one is too near.
    assert number == 52
    left = _BEAT_NS * 4 // 3
    # A millisecond for two readings of the clock; without an agreement it would be any part of a beat.
    assert before + left <= planned <= after + left + 1e6 and planned <= woke
