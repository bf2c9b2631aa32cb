"""One decision: the cap, pressure of memory and bandwidth, noise."""

from __future__ import annotations

import random

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.actions import Placement
from mt_megatron.pipeline.policy.candidates import Candidate, default_of, named
from mt_megatron.pipeline.policy.decide import Decision, decide
from mt_megatron.pipeline.policy.situation import Situation
from mt_megatron.pipeline.simulate.costs import Costs, Link


def situation(
    placement: Placement, microbatches: int = 16, *, costs: Costs | None = None, cap: float | None = None,
    headroom: float | None = None,
) -> Situation:  # fmt: skip
    return Situation(
        placement=placement,
        microbatches=microbatches,
        costs=costs or Costs(weight=1.0),
        cap=None if cap is None else (cap,) * placement.ranks,
        headroom=headroom,
    )


def decided(given: Situation, current: Candidate | None = None, noise: float = 0.0) -> Decision:
    current = current or default_of(given.placement, given.microbatches)
    return decide(given, current, noise=lambda family: noise)


def called(placement: Placement, microbatches: int, name: str) -> Candidate:
    return next(each for each in named(placement, microbatches) if each.label == name)


def test_the_cap_is_never_passed() -> None:
    rng = random.Random(5)
    for _ in range(40):
        placement = Placement(rng.randint(2, 5), rng.randint(1, 3))
        count = rng.randint(2, 12)
        costs = Costs(
            weight=rng.choice([None, 0.9]),
            link=Link(rng.choice([0.0, 0.5, 3.0]), rng.choice([0.4, float("inf")])),
            message=1.0,
        )
        given = situation(
            placement, count, costs=costs, cap=float(rng.randint(placement.chunks, 12)),
            headroom=rng.choice([None, 0.01, 0.5]),
        )  # fmt: skip
        found = decided(given)
        assert given.cap is not None
        if found.switches:
            peaks = found.chosen.peaks(costs)
            assert all(peak <= most + 1e-6 for peak, most in zip(peaks, given.cap, strict=True))
        assert not (costs.weight is None and found.chosen.schedule.splits_backward)
        for label in found.too_large:
            assert label not in found.predicted


def test_a_cap_that_nothing_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="no pipeline schedule fits the memory cap of 1, 1"):
        decided(situation(Placement(2, 2), cap=1.0))


def test_what_passes_the_cap_is_left_even_for_a_slower_schedule() -> None:
    placement = Placement(4, 2)
    current = called(placement, 8, "breadth_first")
    found = decided(situation(placement, 8, cap=6.0), current, noise=10.0)
    assert found.switches and max(found.chosen.peaks(Costs())) <= 6.0
    assert "passes the memory cap" in found.reason


def test_scarce_memory_takes_depth_first() -> None:
    placement = Placement(4, 2)
    current = called(placement, 16, "interleaved")
    found = decided(situation(placement, cap=30.0, headroom=0.02), current)
    assert found.pressure == "memory" and "2.0% of a cap left" in found.reason
    assert max(found.chosen.peaks(Costs())) < max(current.peaks(Costs()))
    assert max(found.chosen.peaks(Costs())) <= max(called(placement, 16, "depth_first").peaks(Costs()))
    # With room the fastest wins, whatever it keeps.
    plenty = decided(situation(placement, cap=30.0, headroom=0.5), current)
    assert plenty.pressure is None


def test_scarce_bandwidth_takes_breadth_first() -> None:
    placement = Placement(4, 2)
    # A message takes as long as the forward that makes it.
    slow = Costs(forward=0.5, backward=1.0, message=1.0, link=Link(0.0, 2.0))
    found = decided(situation(placement, costs=slow), noise=0.05)
    assert found.pressure == "bandwidth" and found.chosen.label == "breadth_first"
    assert "busy for" in found.reason
    # Its activations do not fit: the cap is harder than the bandwidth.
    capped = decided(situation(placement, costs=slow, cap=12.0))
    assert capped.chosen.label != "breadth_first" and "passes the memory cap" in capped.reason
    # Twice as slow, breadth-first waits for wires of which it uses one direction at a time.
    slower = Costs(forward=0.5, backward=1.0, message=1.0, link=Link(0.0, 0.6))
    found = decided(situation(placement, costs=slower), noise=0.05)
    assert found.pressure == "bandwidth" and "breadth-first is predicted to be" in found.reason
    fast = decided(situation(placement, costs=Costs(weight=1.0, message=1.0, link=Link(0.0, 100.0))))
    assert fast.pressure is None


def test_a_gain_within_the_noise_changes_nothing() -> None:
    placement = Placement(4)
    better = decided(situation(placement))
    assert better.switches and better.gain > 0.05
    noisy = decided(situation(placement), noise=better.gain * 1.01)
    assert not noisy.switches and "no schedule is predicted to save more than the noise" in noisy.reason


def test_a_family_that_turned_out_slow_is_left() -> None:
    given = situation(Placement(4))
    first = decided(given)
    assert first.chosen.family.endswith("/split")
    slow = {"1f1b": 1.0, "zb_h1/split": 2.0, "adapted/split": 2.0, "adapted": 1.0}
    again = decide(given, first.chosen, bias=slow)
    assert again.switches and not again.chosen.schedule.splits_backward


def test_the_slow_link_is_named() -> None:
    links = {(1, 2): Link(1.5), (2, 1): Link(1.5)}
    found = decided(situation(Placement(4), costs=Costs(weight=1.0, link=Link(0.01), links=links)))
    assert found.slow_edge is not None and set(found.slow_edge[0]) == {1, 2}
    assert found.switches and found.reason.startswith("best simulated with the link ")
    even = decided(situation(Placement(4), costs=Costs(weight=1.0, link=Link(0.5))))
    assert even.slow_edge is None


def test_equal_inputs_give_equal_decisions() -> None:
    given = situation(Placement(3, 2), 9, costs=Costs(weight=0.8, link=Link(0.7)), cap=11.0)
    one, other = decided(given), decided(given)
    assert one.chosen.schedule == other.chosen.schedule and one.reason == other.reason
