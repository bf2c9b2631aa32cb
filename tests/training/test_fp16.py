"""fp16 training with a dynamic loss scale: as good as fp32, exact over a resume, never for ever stuck."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks

FP16_BOUND = 0.003
"""Largest relative difference to fp32's losses over 20 steps; 0.0006 was seen."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("fp16"))
    [result] = run_ranks(1, "tests.training.fp16_cases:all_cases", folder, timeout=400)
    return dict(result)


def _losses(run: dict[str, Any]) -> list[float]:
    return [run["steps"][str(step)][0] for step in range(1, 21)]


def _scales(run: dict[str, Any]) -> list[float]:
    return [run["records"][step]["loss_scale"] for step in sorted(run["records"], key=int)]


@pytest.mark.parametrize("name", ["fp16", pytest.param("constant", marks=pytest.mark.daily)])
def test_the_loss_falls_and_follows_fp32(found: dict[str, Any], name: str) -> None:
    fp32, fp16 = _losses(found["fp32"]), _losses(found[name])
    assert fp16[-1] < fp16[0] - 0.3
    assert fp16 == pytest.approx(fp32, rel=FP16_BOUND)
    assert fp16 != fp32
    assert found[name]["skipped_iterations"] == 0


def test_the_scale_grows_after_every_window(found: dict[str, Any]) -> None:
    assert _scales(found["moving"]) == [1024.0 * 2 ** (step // 4) for step in range(1, 21)]


@pytest.mark.daily
def test_a_constant_scale_stays(found: dict[str, Any]) -> None:
    assert _scales(found["constant"]) == [512.0] * 20


def test_an_overflow_leaves_out_one_step_and_halves_the_scale(found: dict[str, Any]) -> None:
    overflow, sound = found["overflow"], found["moving"]
    scales = _scales(overflow)
    assert scales[4] == 2048.0 and scales[5] == 1024.0
    assert overflow["skipped_iterations"] == 1 and sound["skipped_iterations"] == 0
    assert overflow["steps"]["6"][1] is None and overflow["steps"]["5"][1] is not None
    # The data goes on and the schedule waits.
    assert overflow["consumed_samples"] == sound["consumed_samples"] == 80
    assert overflow["steps"]["7"][2] == overflow["steps"]["6"][2] == sound["steps"]["6"][2]
    assert overflow["steps"]["7"][0] != sound["steps"]["7"][0]
    assert overflow["divergences"] == [] and overflow["finished"]


@pytest.mark.daily
def test_a_resumed_run_has_the_scale_and_its_counters(found: dict[str, Any]) -> None:
    whole, first, second = found["overflow"], found["first"], found["second"]
    assert first["iteration"] == 7 and len(second["steps"]) == 13
    assert {**first["steps"], **second["steps"]} == whole["steps"]
    assert _scales(first) + _scales(second) == _scales(whole)


@pytest.mark.daily
@pytest.mark.parametrize("name", ["endless", "endless_constant"])
def test_endless_overflows_end_the_run_with_the_module(found: dict[str, Any], name: str) -> None:
    error = found[name]["error"]
    assert "DivergenceError: iteration" in error
    assert "fp16 gradients overflow although the loss scale cannot get smaller, 3 steps in a row" in error
    assert "the gradient that decoder.layers.0.mlp (layer 1 of the model) passes back to its input" in error
