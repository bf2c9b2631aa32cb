"""One run of the named tests per pytest session, of those that the session selected."""

from __future__ import annotations

import sys

import pytest

from tests.coverage_gate.case import all_cases
from tests.coverage_gate.runs import Run, run_cases


@pytest.fixture(scope="session")
def gate_run(request: pytest.FixtureRequest) -> Run:
    """The shared launches: all named tests when the gate itself is selected, else the selected ones."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the tracer reads CPython 3.11 bytecode positions")
    wanted: set[str] | None = set()
    for item in request.session.items:
        if "gate_run" not in getattr(item, "fixturenames", ()):
            continue
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if name is None:
            wanted = None
            break
        wanted.add(name)
    return run_cases([found for found in all_cases() if wanted is None or found.name in wanted])
