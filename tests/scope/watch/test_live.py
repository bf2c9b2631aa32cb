"""Requests and commands that arrive while a training runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.scope.watch.live_ranks import STEPS


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    told: dict[str, Any] = run_ranks(1, "tests.scope.watch.live_ranks:told_while_training")[0]
    return told


def test_requests_are_watched_from_the_next_step_on_beside_those_of_the_start(found: dict[str, Any]) -> None:
    path, steps = "decoder.layers.0.mlp", range(1, STEPS + 1)
    always = {(step, path, what) for step in steps for what in ("mlp", "mlp_hidden")}
    asked = {(step, "decoder.layers.1", "residual") for step in (3, 4, 5)}
    asked |= {(step, "decoder.layers.1.mlp", what) for step in (3, 4, 5) for what in ("mlp", "mlp_hidden")}
    assert {tuple(each) for each in found["tensors"]} == always | asked


def test_what_cannot_be_watched_is_a_line_each(found: dict[str, Any]) -> None:
    lines = found["lines"]
    assert len(lines) == 8
    assert any("found head 99 in 'attention@" in line for line in lines)
    assert any("found sample 8 in 'mlp@" in line and "expected at most 7" in line for line in lines)
    assert sum("found tokens or samples in 'moments@" in line for line in lines) == 2
    assert any("found heads in 'mlp@" in line for line in lines)
    assert any("nowhere" in line for line in lines) and any("'no request'" in line for line in lines)
    assert any("context@embedding" in line and "core attention" in line for line in lines)


def test_the_first_steps_are_sampled_and_a_command_records_the_next_one(found: dict[str, Any]) -> None:
    """However long the interval is: a run can be looked at from its first minute on."""
    assert found["sampled"] == [1, 2, 5]
    first, second = "decoder.layers.0", "decoder.layers.1"
    expected = [(1, first), (2, first), (5, first), (7, first), (7, second)]
    assert [tuple(each) for each in found["residuals"]] == expected


def test_validation_is_a_statistic_of_the_step_that_was_evaluated(found: dict[str, Any]) -> None:
    assert [tuple(each) for each in found["evaluated"]] == [(3, [750.0, 300.0]), (8, [2000.0, 800.0])]
    assert found["attempts"] == [0]


@pytest.mark.parametrize("what", ["about", "sender"])
def test_a_rank_that_fails_at_the_start_costs_watching_alone(what: str) -> None:
    """Else it would raise while the others go on to the step's first collective, and wait there."""
    first, second = run_ranks(2, "tests.scope.watch.live_ranks:one_rank_fails", what, timeout=120)
    assert first["together"] == second["together"] == 2
    if what == "about":
        assert not first["on"] and not second["on"]
        assert first["said"] == [
            "scope: nothing is recorded, training goes on: rank 1: OSError: too many open files"
        ]
    else:
        assert first["on"] and second["on"] and first["said"] == []


def test_commands_reach_the_control_and_are_answered(found: dict[str, Any]) -> None:
    assert found["commands"] == ["pause"]
    assert found["results"] == [{"k": "result", "id": "7", "ok": True, "value": 3}]
