"""Runs of the trainer under pipeline schedules; each function returns JSON-able results."""

from __future__ import annotations

from typing import Any

from tests.training import loop_cases

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
PLAIN = "--hidden-dropout 0 --attention-dropout 0"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --virtual-pipeline-model-parallel-size 2"


def runs(folder: str, flags: dict[str, str]) -> dict[str, Any]:
    """Steps, validations and the error, if any, of a run with each set of flags."""
    loop_cases.start()
    found = {}
    for name, given in flags.items():
        path = name.replace(" ", "_")
        result = loop_cases.run(given.replace("FOLDER", folder), folder, path)
        found[name] = {key: result.get(key) for key in ("steps", "valid", "error")}
    return found
