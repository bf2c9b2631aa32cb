"""List scheduling on measured times: what it makes can be run, keeps its cap and takes as long as it says."""

from __future__ import annotations

import random

import pytest

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.actions import Placement, Style
from mt_megatron.pipeline.policy.list_schedule import Rule, list_schedule, rules
from mt_megatron.pipeline.simulate.costs import Costs, Link
from mt_megatron.pipeline.simulate.memory import memory_peaks
from mt_megatron.pipeline.simulate.program import Program
from mt_megatron.pipeline.validate import validate


def drawn(rng: random.Random) -> tuple[Placement, int, Costs]:
    style = rng.choice([Style.LOOP, Style.LOOP, Style.V])
    placement = Placement(rng.randint(1, 6), 2 if style is Style.V else rng.randint(1, 4), style)
    count, stages = rng.randint(1, 12), placement.stages
    forward = [[rng.uniform(0.2, 2.0) for _ in range(count)] for _ in range(stages)]
    backward = [[each * rng.uniform(1.0, 3.0) for each in of_stage] for of_stage in forward]
    weight = [[each * rng.uniform(0.1, 0.9) for each in of_stage] for of_stage in backward]
    link = Link(rng.choice([0.0, 0.3, 4.0]), rng.choice([1.0, 5.0, float("inf")]))
    size = [[rng.uniform(1.0, 3.0) for _ in range(count)] for _ in range(stages)]
    return placement, count, Costs(
        forward=forward, backward=backward, weight=weight, message=1.0, link=link, activation=size,
        weight_share=rng.choice([0.0, 0.5, 1.0]),
    )  # fmt: skip


def test_every_rule_makes_schedules_that_run_within_their_caps() -> None:
    rng = random.Random(7)
    made = refused = 0
    for _ in range(100):
        placement, count, costs = drawn(rng)
        split = rng.random() < 0.5
        for rule in rules(placement, count, split=split):
            cap = [rng.uniform(3.0, 9.0) * placement.chunks for _ in range(placement.ranks)]
            try:
                found = list_schedule(placement, count, costs, cap, rule)
            except ConfigError as error:
                refused += 1
                assert "raise the cap" in str(error)
                continue
            assert found is not None
            schedule, seconds = found
            made += 1
            assert validate(schedule) == []
            assert Program(schedule).makespan(costs) == pytest.approx(seconds, rel=1e-12)
            peaks = memory_peaks(schedule, costs)
            assert all(peak <= most * (1 + 1e-9) for peak, most in zip(peaks, cap, strict=True))
    assert made > 200 and refused > 5


def test_equal_inputs_give_equal_schedules() -> None:
    placement, count, costs = drawn(random.Random(3))
    for rule in rules(placement, count, split=True):
        assert list_schedule(placement, count, costs, None, rule) == list_schedule(
            placement, count, costs, None, rule
        )


def test_a_limit_ends_the_search_and_no_other() -> None:
    placement, costs = Placement(4), Costs(weight=1.0)
    found = list_schedule(placement, 8, costs)
    assert found is not None
    schedule, seconds = found
    assert list_schedule(placement, 8, costs, below=seconds) is None
    again = list_schedule(placement, 8, costs, below=seconds * 1.0001)
    assert again is not None and again[0].ranks == schedule.ranks


@pytest.mark.parametrize("edge", [(0, 1), (2, 3), (5, 6)])
def test_the_slow_link_decides_who_runs_ahead(edge: tuple[int, int]) -> None:
    placement, count, cap = Placement(8), 24, [10.0] * 8
    slow = {edge: Link(2.0), edge[::-1]: Link(2.0)}
    costs = Costs(weight=1.0, links=slow)
    knowing = list_schedule(placement, count, costs, cap)
    blind = list_schedule(placement, count, Costs(weight=1.0), cap)
    assert knowing is not None and blind is not None
    # The same rule without knowledge of the link: what is gained comes from the delays alone.
    assert knowing[1] < 0.9 * Program(blind[0]).makespan(costs)


def test_a_rank_waits_for_what_comes_before_soon() -> None:
    # The gradient arrives 0.1 after rank 0 could start a W of length 1: with patience it is taken first.
    costs = Costs(forward=1.0, backward=2.0, weight=1.0, link=Link(0.1))
    placement, cap = Placement(2), [2.0, 2.0]
    patient = list_schedule(placement, 12, costs, cap, Rule(patience=0.5))
    hasty = list_schedule(placement, 12, costs, cap, Rule(patience=0.0))
    assert patient is not None and hasty is not None
    assert patient[1] < hasty[1]


def test_caps_and_splits_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="found caps of 3 ranks; expected 2"):
        list_schedule(Placement(2), 4, Costs(weight=1.0), [4.0, 4.0, 4.0])
    with pytest.raises(ConfigError, match="rank 1: 2 chunks.*need 2 of activations and the cap leaves 1.5"):
        list_schedule(Placement(2, 2), 4, Costs(weight=1.0), [4.0, 1.5])
    with pytest.raises(ConfigError, match="no time of its weight gradients"):
        list_schedule(Placement(2), 4, Costs())
