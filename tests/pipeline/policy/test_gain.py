"""Gain of the policy in simulation where one link is slow and another one later.

The whole measurement is ``benchmarks/pipeline/policy_gain.py``; here a few short histories.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mt_megatron.pipeline.actions import Placement
from mt_megatron.pipeline.policy.candidates import named
from mt_megatron.pipeline.policy.situation import Measured
from mt_megatron.pipeline.simulate.costs import Costs

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from pipeline import policy_gain  # noqa: E402
from pipeline.link_histories import HEALTHY, History, draw  # noqa: E402

RANKS, COUNT, STEPS = 4, 8, 50
SEEDS = range(3)


def histories(mechanism: str = "dwell", delay: float = 2.0) -> list[History]:
    return [
        draw(mechanism, seed, ranks=RANKS, microbatches=COUNT, steps=STEPS, delay=delay) for seed in SEEDS
    ]


def best_named(found: list[History]) -> float:
    """Mean step under the named schedule that is best on average, of those that fit the cap."""
    means = []
    for chunks in (1, 2):
        placement = Placement(RANKS, chunks)
        costs = [history.costs(placement, step) for history in found for step in range(STEPS)]
        means += [
            float(each.program.makespans(costs).mean())
            for each in named(placement, COUNT)
            if each.fits(Costs(weight=1.0), policy_gain.cap_of(placement))
        ]
    return min(means)


def test_it_gains_over_every_named_schedule() -> None:
    found = histories()
    policy = float(np.mean([policy_gain.run_policy(each, 2).seconds.mean() for each in found]))
    assert best_named(found) / policy - 1 > 0.2


def test_it_gains_nothing_where_it_is_told_no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    told = History.measured

    def blind(self: History, *given: object) -> Measured:
        measured = told(self, *given)  # type: ignore[arg-type]
        return Measured(
            step=measured.step, seconds=measured.seconds, forward=measured.forward,
            backward=measured.backward, input=measured.input, weight=measured.weight,
        )  # fmt: skip

    found = histories()
    seeing = np.mean([policy_gain.run_policy(each, 2).seconds.mean() for each in found])
    monkeypatch.setattr(History, "measured", blind)
    policy = np.mean([policy_gain.run_policy(each, 2).seconds.mean() for each in found])
    assert policy > 1.08 * seeing


def test_it_loses_next_to_nothing_on_healthy_links() -> None:
    found = histories(delay=0.0)
    policy = float(np.mean([policy_gain.run_policy(each, 2).seconds.mean() for each in found]))
    assert best_named(found) / policy - 1 > -0.01


def test_no_schedule_is_quicker_than_the_bound() -> None:
    history = histories()[0]
    for chunks in (1, 2):
        placement = Placement(RANKS, chunks)
        costs, cap = history.costs(placement, 3), policy_gain.cap_of(placement)
        bound = policy_gain.least_step(placement, costs, cap)
        for each in named(placement, COUNT):
            if each.fits(Costs(weight=1.0), cap):
                assert each.program.makespan(costs) >= bound


def test_both_mechanisms_are_what_they_say() -> None:
    for mechanism in ("dwell", "markov"):
        shares, ramped = [], False
        for seed in range(40):
            history = draw(mechanism, seed, ranks=8, microbatches=2, steps=200, delay=1.0)
            level = (history.delays - HEALTHY).round(6)
            shares.append(float((level.max(axis=1) > 0.3).mean()))
            ramped |= bool(((level > 0.1) & (level < 0.5)).any())
        if mechanism == "dwell":
            assert min(shares) == 1.0 and not ramped
        else:
            assert 0.75 < np.mean(shares) < 0.95 and ramped
    one, other = (draw("markov", 5, ranks=4, microbatches=4, steps=9, delay=1.0) for _ in range(2))
    assert (one.delays == other.delays).all() and (one.noise == other.noise).all()


@pytest.mark.soak
@pytest.mark.parametrize("microbatches", policy_gain.MICROBATCHES)
@pytest.mark.parametrize("delay", policy_gain.DELAYS)
def test_the_recorded_gains_are_what_comes_out(microbatches: int, delay: float) -> None:
    latest = max((ROOT / "results").glob("pipeline-policy-markov-*.json"))
    cells = json.loads(latest.read_text())["cells"]
    recorded = next(c for c in cells if (c["microbatches"], c["delay"]) == (microbatches, delay))
    cell = policy_gain.measure("markov", range(policy_gain.HISTORIES), microbatches, delay)
    # Later changes may move it; a loss is seen.
    assert np.median(cell.policy) < 1.01 * np.median(recorded["policy"])
    assert np.percentile(cell.gains(cell.best(0)), 5) >= -0.01
