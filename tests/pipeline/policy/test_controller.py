"""The policy over many steps: it follows a link that becomes slow, and leaves noise alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mt_megatron.pipeline.actions import Placement, Schedule
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.policy import candidates
from mt_megatron.pipeline.policy.automatic import controller
from mt_megatron.pipeline.policy.candidates import Candidate
from mt_megatron.pipeline.policy.controller import MEMORY_SHARE, OUTCOME, Controller, Outcome
from mt_megatron.pipeline.policy.decide import Decision, decide
from mt_megatron.pipeline.policy.situation import EdgeTime, Measured
from mt_megatron.pipeline.policy.smoothing import Smoothed
from mt_megatron.pipeline.simulate.costs import Costs, Link
from mt_megatron.pipeline.simulate.program import Program


class Pipeline:
    """True times of a pipeline, and the policy that sees them measured."""

    def __init__(
        self, placement: Placement, microbatches: int, noise: float = 0.01, **options: object
    ) -> None:
        self.control = Controller(placement, microbatches, **options)  # type: ignore[arg-type]
        self.placement = placement
        self.slow: dict[tuple[int, int], float] = {}
        self.noise = noise
        self.overhead = 1.0
        """Time that a split backward really takes, over its simulated one."""
        self.rng = random.Random(0)
        self.decisions: list[Decision] = []
        self.outcomes: list[Outcome] = []
        self.step = 0

    def run(self, steps: int, **measured: object) -> list[float]:
        """Seconds of each step."""
        seconds = []
        for _ in range(steps):
            links = {edge: Link(delay) for edge, delay in self.slow.items()}
            costs = Costs(forward=1.0, backward=2.0, weight=1.0, link=Link(0.02), links=links)
            program = self.control.current.program
            split = bool(program.schedule.splits_backward)
            seconds.append(program.makespan(costs) * (self.overhead if split else 1.0))
            seen = self._measured(seconds[-1], split)
            outcome = self.control.observe(replace(seen, **measured))  # type: ignore[arg-type]
            self.step += 1
            decision = self.control.propose()
            if decision is not None:
                self.decisions.append(decision)
                outcome = self.control.adopt(decision) or outcome
            if outcome is not None:
                self.outcomes.append(outcome)
        return seconds

    def _measured(self, seconds: float, split: bool) -> Measured:
        def about(value: float) -> float:
            return value * (1 + self.noise * self.rng.gauss(0, 1))

        stages = self.placement.stages
        ranks = range(self.placement.ranks - 1)
        edges = [edge for rank in ranks for edge in ((rank, rank + 1), (rank + 1, rank))]
        return Measured(
            step=self.step,
            seconds=about(seconds),
            forward=[about(1.0) for _ in range(stages)],
            backward=None if split else [about(2.0) for _ in range(stages)],
            input=[about(1.0) for _ in range(stages)] if split else None,
            weight=[about(1.0) for _ in range(stages)] if split else None,
            edges={edge: EdgeTime(delay=about(self.slow.get(edge, 0.02))) for edge in edges},
        )

    @property
    def switches(self) -> list[Decision]:
        return [each for each in self.decisions if each.switches]


def both(one: int, other: int, delay: float) -> dict[tuple[int, int], float]:
    return {(one, other): delay, (other, one): delay}


def test_it_follows_the_slow_link() -> None:
    pipeline = Pipeline(Placement(4), 16, cap=(6.0,) * 4)
    pipeline.run(10)
    healthy = pipeline.control.current
    for edge in ((0, 1), (2, 3)):
        pipeline.slow = both(*edge, 3.0)
        first, *rest = pipeline.run(12)
        # One step under the old schedule: what it measured is what the next one is made for.
        assert max(rest) < 0.9 * first
        slow = pipeline.switches[-1].slow_edge
        assert slow is not None and set(slow[0]) == set(edge)
    pipeline.slow = {}
    last = pipeline.run(12)[-1]
    costs = Costs(weight=1.0, link=Link(0.02))
    assert last == pytest.approx(healthy.program.makespan(costs), rel=0.02)


def test_it_sees_measured_delays_and_nothing_else() -> None:
    # Negative control: the delays are not told, and nothing is gained.
    pipeline = Pipeline(Placement(4), 16, cap=(6.0,) * 4)
    pipeline.run(10)
    pipeline.slow = both(0, 1, 2.0)
    first, *rest = pipeline.run(12, edges={})
    assert min(rest) > 0.95 * first


def test_noise_alone_does_not_switch_back_and_forth() -> None:
    pipeline = Pipeline(Placement(4), 16, noise=0.1, cap=(6.0,) * 4)
    pipeline.run(20)
    before = len(pipeline.switches)
    pipeline.run(60)
    assert len(pipeline.switches) - before <= 4


def test_a_switch_that_brings_nothing_is_taken_back() -> None:
    pipeline = Pipeline(Placement(4), 16, cap=(6.0,) * 4)
    pipeline.overhead = 1.5
    pipeline.run(70)
    assert any(each.chosen.schedule.splits_backward for each in pipeline.switches)
    assert not pipeline.control.current.schedule.splits_backward


def test_the_outcome_is_what_was_measured() -> None:
    pipeline = Pipeline(Placement(4), 16, noise=0.001, cap=(6.0,) * 4)
    seconds = pipeline.run(5)
    pipeline.slow = both(1, 2, 2.0)
    seconds += pipeline.run(30)
    found = pipeline.outcomes[-1]
    assert found.steps >= 3
    after = np.median(seconds[found.decided_at + 1 : found.decided_at + 1 + found.steps])
    assert found.seconds == pytest.approx(after, rel=0.01)
    assert found.gain == pytest.approx(1 - found.seconds / found.seconds_before)


def switched() -> tuple[Pipeline, Candidate]:
    """A pipeline that has just switched because of a slow link, and the schedule before it."""
    pipeline = Pipeline(Placement(4), 16, noise=0.001, cap=(6.0,) * 4)
    pipeline.run(5)
    pipeline.slow = both(1, 2, 2.0)
    before, earlier = pipeline.control.current, len(pipeline.switches)
    while len(pipeline.switches) == earlier:
        before = pipeline.control.current
        pipeline.run(1)
    assert before is not pipeline.control.current
    return pipeline, before


def measured_now(pipeline: Pipeline, ran: Candidate) -> Measured:
    links = {edge: Link(delay) for edge, delay in pipeline.slow.items()}
    costs = Costs(forward=1.0, backward=2.0, weight=1.0, link=Link(0.02), links=links)
    return pipeline._measured(ran.program.makespan(costs), bool(ran.schedule.splits_backward))


@pytest.mark.parametrize("heals", [True, False])
def test_a_link_that_heals_is_no_gain_of_the_switch(heals: bool) -> None:
    pipeline, _ = switched()
    if heals:
        pipeline.slow = {}
    control, found = pipeline.control, []
    for _ in range(OUTCOME):
        # No decision in between: it may be dear.
        found.append(control.observe(measured_now(pipeline, control.current)))
        pipeline.step += 1
    assert [each is None for each in found] == [True] * (OUTCOME - 1) + [heals]


def test_the_last_step_before_a_switch_is_not_the_new_schedules() -> None:
    """Where times are read late, it is told after the switch."""
    pipeline, before = switched()
    control = pipeline.control
    assert before is not control.current and control._trial is not None
    late = replace(measured_now(pipeline, before), seconds=1e6)
    forward, ratios = control._forward[0].mean, {name: [*each] for name, each in control._ratios.items()}
    control.observe(late, before)
    assert control._trial.steps == 0 and not control._times and control._forward[0].mean != forward
    assert {name: [*each] for name, each in control._ratios.items()} == ratios
    control.observe(late)
    assert control._trial.steps == 1 and control._times, "a control: it is taken for the new schedule's"


def test_a_device_says_how_much_memory_there_is() -> None:
    placement, mib = Placement(2), 2.0**20
    pipeline = Pipeline(placement, 8, cap=(3.0, 3.0), cap_is_given=False)

    # 10 MiB of weights and the like, 1 MiB an activation, room for 5 of them.
    def told(activations: float) -> dict[str, object]:
        return {
            "memory": [(10 + activations) * mib] * 2,
            "activation": [mib] * 2,
            "capacity": [15.01 * mib / MEMORY_SHARE] * 2,
        }  # fmt: skip

    pipeline.slow = both(0, 1, 3.0)
    peak = max(pipeline.control.current.peaks(Costs()))
    for _ in range(12):
        pipeline.run(1, **told(peak))
        peak = max(peak, *pipeline.control.current.peaks(Costs()))
    assert 3.0 < peak <= 5.0
    # A cap that the user gave stays.
    given = Pipeline(placement, 8, cap=(3.0, 3.0))
    given.slow = both(0, 1, 3.0)
    given.run(12, **told(2.0))
    assert max(given.control.current.peaks(Costs())) <= 3.0


def test_a_start_makes_one_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many stages and micro-batches each takes long to make and to compile; the first decision makes
    those that fit the cap ready to be timed."""
    made: list[str] = []
    compiled: list[str] = []

    def generating(name: str, **sizes: Any) -> Schedule:
        made.append(name)
        return generate(name, **sizes)

    def compiling(schedule: Schedule) -> Program:
        compiled.append(schedule.name)
        return Program(schedule)

    monkeypatch.setattr(candidates, "generate", generating)
    monkeypatch.setattr(candidates, "Program", compiling)
    # Sizes that no other test has.
    control = controller(Placement(3, 3), 39, None)
    assert made == ["interleaved"] and compiled == []
    begun = control.situation()
    decide(begun, control.current)
    assert {"depth_first", "zb_h1", "breadth_first", "hybrid"} <= set(made)
    fitting = [each for each in candidates.named(Placement(3, 3), 39) if each.fits(begun.costs, begun.cap)]
    assert 0 < len(fitting) < len(made)
    assert sorted(set(compiled) - {"adapted"}) == sorted({each.schedule.name for each in fitting})


def test_another_number_of_micro_batches_keeps_what_was_measured() -> None:
    pipeline = Pipeline(Placement(4), 16, cap=(6.0,) * 4)
    pipeline.slow = both(1, 2, 2.0)
    pipeline.run(6)
    other = Controller(Placement(4), 8, cap=(6.0,) * 4)
    assert other.propose() is None
    other.learn_from(pipeline.control)
    decision = other.propose()
    assert decision is not None and decision.switches
    assert decision.slow_edge is not None and set(decision.slow_edge[0]) == {1, 2}


def test_a_ramp_of_the_batch_size_leaves_each_number_of_micro_batches_its_cap() -> None:
    """As long as no device has said how much memory there is; what one has said holds for all numbers."""
    few, many = (controller(Placement(4), count, None) for count in (1, 16))
    own = many.cap
    seen = Measured(step=0, seconds=12.0, forward=[1.0] * 4, backward=[2.0] * 4)
    few.observe(seen)
    many.learn_from(few)
    assert many.cap == own and many.current.fits(many.situation().costs, many.cap)
    decision = many.propose()
    assert decision is not None and decision.seconds <= decision.seconds_before
    memory: dict[str, Any] = {"memory": [4e9] * 4, "activation": [1e8] * 4, "capacity": [8e10] * 4}
    few.observe(replace(seen, step=1, **memory))
    more = controller(Placement(4), 32, None)
    more.learn_from(few)
    assert more.cap == few.cap == (MEMORY_SHARE * 8e10,) * 4
    more.observe(replace(seen, step=2, **memory))
    fewer = controller(Placement(4), 1, None)
    fewer.learn_from(more)
    fewer.observe(replace(seen, step=3, **memory))
    # The device's peak is that of the larger schedule, whose activations are not static.
    assert fewer._static == more._static


def test_smoothing_follows_a_step_at_once_and_noise_slowly() -> None:
    smoothed, rng = Smoothed(0.02), random.Random(2)
    for _ in range(20):
        smoothed.add(1 + 0.05 * rng.gauss(0, 1))
    assert smoothed.mean == pytest.approx(1.0, abs=0.05)
    smoothed.add(1.12)
    assert smoothed.mean < 1.08
    smoothed.add(3.0)
    assert smoothed.mean == 3.0
    smoothed.add(float("nan"))
    assert smoothed.mean == 3.0
