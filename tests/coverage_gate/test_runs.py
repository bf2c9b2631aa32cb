"""What a run keeps: nothing of a test that failed, and every name of a launch that died."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.coverage_gate import runs
from tests.coverage_gate.case import Case, Layout
from tests.launch import RankError


def _case(name: str, **layout: Any) -> Case:
    return Case(name=name, layout=Layout(**layout), run=lambda: None)


def _launches(monkeypatch: pytest.MonkeyPatch, errors: dict[str, str | None]) -> list[tuple[Any, ...]]:
    """Let every launch record one point per case and fail the cases in ``errors``."""
    made: list[tuple[Any, ...]] = []

    def run_ranks(
        world: int,
        target: str,
        names: list[str],
        without: Any,
        folder: str,
        traced: bool,
        timeout: float,
        env: Any,
    ) -> list[Any]:
        made.append((world, tuple(without), tuple(names)))
        if not traced:
            return [{"cases": {name: {"error": None, "seconds": 0.5} for name in names}, "patches": []}]
        if "dies" in names:
            raise RankError("rank 0 ended with exit code 9")
        for name in names:
            record = {"test": name, "rank": 0, "points": [f"point of {name}"]}
            (Path(folder) / f"{name}.0.json").write_text(json.dumps(record))
        outcomes = {name: {"error": errors.get(name), "seconds": 0.5} for name in names}
        return [{"cases": outcomes, "patches": [f"patch{without}"]}] * world

    monkeypatch.setattr(runs, "run_ranks", run_ranks)
    return made


def test_drops_the_record_of_a_failed_test(monkeypatch: pytest.MonkeyPatch) -> None:
    _launches(monkeypatch, {"bad": "Traceback: wrong device"})
    run = runs.run_cases([_case("good"), _case("bad")])
    assert run.records == {"good": {"point of good"}}
    assert list(run.errors) == ["bad"] and "wrong device" in run.errors["bad"]


def test_names_every_test_of_a_launch_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    _launches(monkeypatch, {})
    run = runs.run_cases([_case("good"), _case("dies", world=2), _case("waits", world=2)])
    assert set(run.errors) == {"dies", "waits"} and "exit code 9" in run.errors["dies"]
    assert set(run.records) == {"good"}


def test_shares_launches_and_takes_patches_from_complete_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _launches(monkeypatch, {})
    cases = [_case("a"), _case("b", world=0), _case("c", world=2), _case("d", world=2, without=("linear",))]
    run = runs.run_cases(cases)
    assert made == [(1, (), ("a", "b")), (2, (), ("c",)), (2, ("linear",), ("d",))]
    assert run.patches == {"patch()"}


def test_values_alone_leave_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    _launches(monkeypatch, {})
    run = runs.run_cases([_case("good")], traced=False)
    assert run.records == {} and run.errors == {} and run.seconds == {"good": 0.5}
