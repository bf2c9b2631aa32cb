"""Ranks that round otherwise, four stages of two pipelines: all leave ``auto`` before the same step.

The ranks are threads, so that eight of them fit; what differs between processes (rank, sums) is theirs alone.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.pipeline.policy import automatic
from mt_megatron.pipeline.policy.controller import Controller
from mt_megatron.pipeline.simulate.costs import Costs, Link
from tests.pipeline.policy.test_exchange import times_of

STAGES, PIPELINES = 4, 2
RANKS = STAGES * PIPELINES
SWITCHED, STEPS = 2, 5
"""Step that the first decision is made for, from the times of the one before it."""


class World:
    """Ranks that are threads, and sums over them."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._barrier = threading.Barrier(RANKS, timeout=60)
        self._given: list[list[int]] = [[] for _ in range(RANKS)]

    def get_rank(self) -> int:
        return int(self._own.rank)

    def get_world_size(self) -> int:
        return RANKS

    def sum(self, values: list[int]) -> list[int]:
        """A rank that comes alone, or with another length than the others, breaks the barrier for all."""
        self._given[self.get_rank()] = values
        self._barrier.wait()
        found = [sum(each) for each in zip(*self._given, strict=True)]
        self._barrier.wait()
        return found

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """What ``body(rank)`` returns on each rank."""
        found: list[Any] = [None] * RANKS

        def rank(number: int) -> None:
            self._own.rank = number
            try:
                found[number] = body(number)
            except BaseException as error:  # noqa: BLE001 - shown by the main thread.
                found[number] = error
                self._barrier.abort()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(RANKS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        errors = [each for each in found if isinstance(each, BaseException)]
        for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
            raise error
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()

    class Sum:
        def __init__(self, values: list[int]) -> None:
            self._values = list(values)

        def wait(self) -> list[int]:
            return made.sum(self._values)

    monkeypatch.setattr(automatic, "dist", made)
    monkeypatch.setattr(automatic, "_Sum", Sum)
    monkeypatch.setattr(automatic, "_place", lambda: (*divmod(made.get_rank(), PIPELINES), True))
    # Not Megatron-Core, which would be imported into the tests' own process.
    state = SimpleNamespace(get_data_parallel_world_size=lambda: PIPELINES)
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(parallel_state=state))
    yield made


def train(
    world: World, begin: int, otherwise: Callable[[int, int], bool], steps: int = STEPS
) -> list[dict[str, Any]]:
    """Digests of the schedules that each rank ran, by step, and its lines. ``otherwise``: (rank, step that
    is observed) -> whether the rank's number has another last bit then."""

    def rank(number: int) -> dict[str, Any]:
        said: list[str] = []
        auto = automatic.automatic(ranks=STAGES, chunks=1)
        auto.begin_at(begin, folder=None, say=said.append)
        ran = []
        for step in range(steps):
            auto(step, 2 * STAGES, False)
            control = auto._latest.control  # type: ignore[union-attr]
            ran.append(control.current.digest)
            if not auto._adapts:
                continue
            slow = {(1, 2): Link(0.06), (2, 1): Link(0.06)}
            costs = Costs(forward=0.01, backward=0.02, weight=0.01, link=Link(0.001), links=slow)
            schedule = control.current.schedule
            times = times_of(schedule, costs, dict.fromkeys(range(STAGES), 0))[number // PIPELINES]
            auto.end_step(schedule, SimpleNamespace(is_host=True, read=lambda times=times: times))  # type: ignore[arg-type]
        return {"ran": ran, "said": said}

    observe = Controller.observe

    def rounding(control: Controller, measured: Any, ran: Any) -> Any:
        outcome = observe(control, measured, ran)
        if otherwise(world.get_rank(), measured.step - begin):
            smoothed = control._forward[2]
            smoothed.mean = math.nextafter(smoothed.mean, 2.0)
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Controller, "observe", rounding)
        return world.run(rank)


@pytest.mark.parametrize(("begin", "odd"), [(0, 0), (100, 5)], ids=["the rank that writes", "resumed"])
def test_all_leave_before_the_same_step_where_it_was_just_switching(
    world: World, begin: int, odd: int
) -> None:
    """The numbers that the switch is decided from differ: all switch, then all go back."""
    alike = train(world, begin, lambda rank, step: False, STEPS + 5)
    ran = alike[0]["ran"][:STEPS]
    assert all(each["ran"] == alike[0]["ran"] for each in alike)
    assert not any("to the end" in line for line in alike[0]["said"])
    outcomes = [line for line in alike[0]["said"] if " saved " in line]
    assert f"the switch before step {begin + SWITCHED + 1} saved" in outcomes[0]
    assert any(f"from step {begin + SWITCHED + 1} on, predicted to save" in line for line in alike[0]["said"])
    assert ran == [ran[0]] * SWITCHED + [ran[-1]] * (STEPS - SWITCHED) and ran[-1] != ran[0]

    found = train(world, begin, lambda rank, step: rank == odd and step == SWITCHED - 1)
    for each in found:
        assert each["ran"] == [*ran[: SWITCHED + 1], *[ran[0]] * (STEPS - SWITCHED - 1)]
    assert [line for each in found[1:] for line in each["said"]] == []
    (line,) = [line for line in found[0]["said"] if "to the end" in line]
    assert f"1f1b from step {begin + SWITCHED + 2} on, to the end" in line
    assert f"after step {begin + SWITCHED + 1} ranks have reckoned different times of stages" in line
    assert f"(rank {odd})" in line


def test_two_kinds_of_processors_are_told_apart(world: World) -> None:
    """A half of the ranks rounds otherwise in every step: what the others reckon counts as usual."""
    found = train(world, 0, lambda rank, step: rank >= RANKS // 2)
    assert all(each["ran"] == found[0]["ran"] for each in found)
    (line,) = [line for line in found[0]["said"] if "to the end" in line]
    assert "(ranks 4, 5, 6, 7)" in line
