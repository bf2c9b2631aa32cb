"""Every named test of the gate, reported one by one; they share two launches (see ``runs``)."""

from __future__ import annotations

import pytest

from tests.coverage_gate.case import all_cases
from tests.coverage_gate.runs import Run


@pytest.mark.parametrize("name", [found.name for found in all_cases()])
def test_case(name: str, gate_run: Run) -> None:
    """The case passed on every rank."""
    if name in gate_run.errors:
        pytest.fail(gate_run.errors[name], pytrace=False)
    assert name in gate_run.seconds, "the case was never run"
