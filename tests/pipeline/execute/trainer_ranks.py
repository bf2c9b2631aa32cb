"""Runs of the trainer under pipeline schedules; each function returns JSON-able results."""

from __future__ import annotations

from typing import Any

from tests.layers.attention import packed_ranks
from tests.training import loop_cases


def runs(folder: str, flags: dict[str, str]) -> dict[str, Any]:
    """Steps, validations and the error, if any, of a run with each set of flags, one after the other."""
    loop_cases.start()
    found = {}
    for name, given in flags.items():
        result = loop_cases.run(given.replace("FOLDER", folder), folder, name.replace(" ", "_"))
        found[name] = {key: result.get(key) for key in ("steps", "valid", "error")}
    return found


def packed(schedules: list[str]) -> list[Any]:
    """Loss and norm of the gradients of documents packed, masked, and neither, under each schedule."""
    loop_cases.start()
    stages = "--pipeline-model-parallel-size 2"
    return [packed_ranks.of_a_pipeline(f"{stages} --pipeline-schedule {name}") for name in schedules]
