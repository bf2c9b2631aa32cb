"""The gate holds on the emulated musa device too: the same named tests, on tensors of another device."""

from __future__ import annotations

import sys

import pytest

from tests.coverage_gate.case import all_cases
from tests.coverage_gate.gate import GateError, judge, read_unreachable
from tests.coverage_gate.points import installed_root, list_points
from tests.coverage_gate.runs import Run, run_cases
from tests.emulators import environment, needs_emulated_musa

pytestmark = [
    pytest.mark.daily,
    needs_emulated_musa(),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11), reason="the tracer reads CPython 3.11 bytecode positions"
    ),
]


@pytest.fixture(scope="module")
def run() -> Run:
    return run_cases(all_cases(), target="musa", environment=environment())


def test_every_named_test_passes_on_it(run: Run) -> None:
    assert not run.errors, "\n".join(f"{name}\n{error}" for name, error in run.errors.items())


def test_every_touch_point_is_executed_or_unreachable_with_a_reason(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    points = list_points(installed_root())
    verdict = judge(points, run.records, read_unreachable(target="musa"), run.patches, target="musa")
    with capsys.disabled():
        print("\n" + verdict.summary())
    verdict.require()


def test_the_cpus_exceptions_do_not_hold_here(run: Run) -> None:
    points = list_points(installed_root())
    with pytest.raises(GateError, match="StragglerDetector.configure"):
        judge(points, run.records, read_unreachable(target="cpu"), run.patches, target="musa").require()
