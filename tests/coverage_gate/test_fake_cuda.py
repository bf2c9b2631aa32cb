"""The gate on fake CUDA ranks: what forward executes there, and what is left to a real device and why."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.coverage_gate.gate import (
    FAKE_CUDA,
    GateError,
    Unreachable,
    Verdict,
    judge,
    read_unreachable,
)
from tests.coverage_gate.points import Point, installed_root, list_points
from tests.coverage_gate.runs import Run
from tests.coverage_gate.tracer import IMPORTS
from tests.fake_cuda import needs_a_cpu_build
from tests.fake_cuda.outcomes import patches, records

pytestmark = [
    pytest.mark.daily,
    needs_a_cpu_build,
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11), reason="the tracer reads CPython 3.11 bytecode positions"
    ),
]


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return list_points(installed_root())


@pytest.fixture(scope="module")
def listed() -> dict[str, Unreachable]:
    return {**read_unreachable(target="cuda"), **read_unreachable(FAKE_CUDA, target="cuda")}


def verdict(
    points: list[Point], listed: Mapping[str, Unreachable], run: Run, executed: Mapping[str, set[str]]
) -> Verdict:
    on_cpu = set().union(*(keys for name, keys in run.records.items() if name != IMPORTS))
    return judge(points, executed, listed, patches() | run.patches, "cuda", on_cpu)


def test_every_touch_point_is_executed_or_left_to_a_device(
    gate_run: Run, points: list[Point], listed: dict[str, Unreachable], capsys: pytest.CaptureFixture[str]
) -> None:
    found = verdict(points, listed, gate_run, records())
    with capsys.disabled():
        print("\n" + found.summary())
    found.require()
    assert len(found.executed) >= 40


def test_a_point_that_no_rank_executes_any_more_is_named(
    gate_run: Run, points: list[Point], listed: dict[str, Unreachable]
) -> None:
    """Negative control: without what the ranks did, all of it is missing."""
    executed = verdict(points, listed, gate_run, records()).executed
    with pytest.raises(GateError) as caught:
        verdict(points, listed, gate_run, {}).require()
    assert str(caught.value).count("not executed by any named test") == len(executed)


def test_what_is_left_to_a_device_must_have_a_named_test(
    gate_run: Run, points: list[Point], listed: dict[str, Unreachable]
) -> None:
    """Negative control: take the named tests of the rng away, and their points are nobody's."""
    rest = {name: keys for name, keys in gate_run.records.items() if not name.startswith("rng.")}
    with pytest.raises(GateError, match="left to a real device, but no named test executes it: tensor_par"):
        verdict(points, listed, replace(gate_run, records=rest), records()).require()
