"""Runs of the trainer under pipeline schedules; each function returns JSON-able results."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

from mt_megatron.checkpoint import save
from mt_megatron.parallel.rank_layout import RankLayout
from mt_megatron.pipeline.choice import ScheduleChoice, parse
from tests.layers.attention import packed_ranks
from tests.training import loop_cases


def runs(folder: str, flags: dict[str, str]) -> dict[str, Any]:
    """Steps, validations and the error, if any, of a run with each set of flags, one after the other."""
    loop_cases.start()
    found = {}
    for name, given in flags.items():
        result = loop_cases.run(given.replace("FOLDER", folder), folder, name.replace(" ", "_"))
        found[name] = {key: result.get(key) for key in ("steps", "valid", "error", "carried")}
    return found


def switching(folder: str, flags: str, pp: int, chunks: int, schedules: list[str]) -> dict[str, Any]:
    """A run by upstream's schedule; one that takes the next of ``schedules`` in every step; and one that
    does so backwards, stops after 3 steps and goes on forwards."""
    loop_cases.start()
    named = [parse(name).source(pp, chunks) for name in schedules]
    ran: list[str] = []

    def in_turns(order: list[Any]) -> Any:
        def choose(step: int, microbatches: int, forward_only: bool) -> Any:
            schedule = order[step % len(order)](step, microbatches, forward_only)
            if not forward_only:
                ran.append(schedule.name)
            return schedule

        return mock.patch.object(ScheduleChoice, "source", lambda self, ranks, count: choose)

    found = {"upstream": loop_cases.run(flags, folder, "upstream")}
    flags = f"{flags} --pipeline-schedule {schedules[0]}"
    with in_turns(named):
        found["switched"] = loop_cases.run(flags, folder, "switched")
    with in_turns(named[::-1]):
        found["first"] = loop_cases.run(f"{flags} --save {folder}/saved --exit-interval 3", folder, "first")
    with in_turns(named):
        found["second"] = loop_cases.run(f"{flags} --save {folder}/saved", folder, "second")
    results: dict[str, Any] = {
        name: {key: result.get(key) for key in ("steps", "valid", "error")} for name, result in found.items()
    }
    return {**results, "ran": ran}


def resumed_from_an_earlier_version(folder: str, flags: str) -> dict[str, Any]:
    """Four steps with dropout; and two, whose checkpoint says nothing of a V, and the others after it."""
    loop_cases.start()
    flags = f"{flags} --train-iters 4"
    whole = loop_cases.run(flags, folder, "whole")

    def without_v(given: Any) -> dict[str, Any]:
        known = dataclasses.asdict(given)
        assert ("v" in known) == isinstance(given, RankLayout)
        return {name: value for name, value in known.items() if name != "v"}

    with mock.patch.object(save, "asdict", without_v):
        loop_cases.run(f"{flags} --exit-interval 2 --save {folder}/old", folder, "first")
    second = loop_cases.run(f"{flags} --save {folder}/old --strict", folder, "second")
    return {"whole": whole["steps"], "error": second.get("error"), "second": second.get("steps")}


def packed(schedules: list[str]) -> list[Any]:
    """Loss and norm of the gradients of documents packed, masked, and neither, under each schedule."""
    loop_cases.start()
    stages = "--pipeline-model-parallel-size 2"
    return [packed_ranks.of_a_pipeline(f"{stages} --pipeline-schedule {name}") for name in schedules]
