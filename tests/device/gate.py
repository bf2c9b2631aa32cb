"""The named tests of the coverage gate on the device: every touch point of megatron.core, values checked."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tests.coverage_gate.case import all_cases
from tests.coverage_gate.runs import run_cases
from tests.device.result import Result


def results(backend: str, devices: int, environment: Mapping[str, str]) -> list[Result]:
    """One result per named test; those that need more devices than there are are skipped. Touch points are
    counted where the tracer knows the bytecode (CPython 3.11)."""
    cases = all_cases()
    fits = [case for case in cases if case.layout.launch[0] <= devices]
    traced = sys.version_info[:2] == (3, 11)
    run = run_cases(fits, backend, timeout=900, environment=environment, traced=traced)
    found = []
    for case in cases:
        needed = case.layout.launch[0]
        if needed > devices:
            reason = f"needs {needed} devices and {devices} is used"
            found.append(Result(section="gate", name=case.name, outcome="skipped", reason=reason))
        elif case.name in run.errors:
            found.append(
                Result(section="gate", name=case.name, outcome="failed", reason=run.errors[case.name])
            )
        else:
            points = len(run.records.get(case.name, ())) if traced else "not counted on this Python"
            found.append(
                Result(
                    section="gate",
                    name=case.name,
                    outcome="passed",
                    seconds=run.seconds[case.name],
                    figures={"touch_points": points},
                )
            )
    return found
