"""Two runs side by side: the planted first step and module are named, and equal runs are said to be."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.errors import ScopeError
from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.report.compare import (
    Comparison,
    Difference,
    _numbers,
    as_map,
    compare,
    difference,
    text,
)
from tests.scope.synthetic import RunShape, write_run

SHAPE = RunShape(steps=40, interval=5, tp=1, experts=4, tensor_every=0, token_every=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base")
    write_run(run, SHAPE, extras=False, through_bytes=False)
    return run


def compared(base: Path, run: Path, shape: RunShape, **options: Any) -> Comparison:
    write_run(run, shape, extras=False, through_bytes=False)
    with open_recording(base) as a, open_recording(run) as b:
        return compare(a, b, **options)


def test_equal_runs_are_equal(base: Path, tmp_path: Path) -> None:
    found = compared(base, tmp_path, replace(SHAPE, session="another"))
    assert found.equal and found.largest == 0.0 and (found.steps, found.samples) == (40, 8)
    assert found.values > 8 * 40 and not found.left_out
    assert text(found).startswith("equal: 40 common steps, 8 of them with statistics")


def test_values_that_ranks_hold_in_other_shares_are_equal_within_rounding(tmp_path: Path) -> None:
    """The same sums in another order of nodes: not to the bit, but within 1e-12."""
    shape = RunShape(steps=10, interval=5, tp=4, pp=1, tensor_every=0, token_every=0)
    write_run(tmp_path / "a", shape, extras=False)
    found = compared(tmp_path / "a", tmp_path / "b", replace(shape, nodes=2), tolerance=1e-12)
    assert found.equal and found.largest < 1e-12


@pytest.mark.parametrize(
    ("step", "module"),
    [
        (20, "decoder.layers.2.mlp"),
        (1, "decoder.layers.0.self_attention"),
        (38, "decoder.layers.3.mlp"),
        (25, "decoder.layers.1"),
    ],
)
def test_the_first_step_and_module_are_named(step: int, module: str, base: Path, tmp_path: Path) -> None:
    """From ``step`` on ``module`` and all after it are 1 % larger: the loss of that step is the first to
    differ, and of the statistics those of the next sampled step."""
    found = compared(base, tmp_path, replace(SHAPE, differs_from=step, differs_at=module))
    assert not found.equal
    assert found.first_loss is not None and found.first_loss.step == step
    sampled = 5 * math.ceil(step / 5)
    assert found.first[0].step == sampled
    named = next(each.path for each in found.first if each.path)
    # A router is within its MLP and is computed before it.
    assert named.removesuffix(".router") == module
    assert f"first module: {named} at step {sampled}" in text(found)
    assert found.differing >= len(found.first) and found.largest == pytest.approx(0.01, rel=0.5)


def test_a_difference_between_samples_is_seen_in_the_loss_alone(base: Path, tmp_path: Path) -> None:
    found = compared(base, tmp_path, replace(SHAPE, steps=39, differs_from=36))
    assert found.first_loss is not None and found.first_loss.step == 36 and not found.first
    assert "no statistic that was recorded differs" in text(found)


def test_the_tolerance_allows_what_is_below_it(base: Path, tmp_path: Path) -> None:
    shape = replace(SHAPE, differs_from=20)
    found = compared(base, tmp_path, shape, tolerance=0.02)
    assert found.equal and 0.005 < found.largest < 0.02
    assert "equal within 0.02" in text(found) and "largest relative difference" in text(found)


def test_nan_parts_from_numbers(base: Path, tmp_path: Path) -> None:
    found = compared(base, tmp_path, replace(SHAPE, nan_at=20))
    assert found.first_loss is not None and found.first_loss.step == 20
    assert math.isinf(found.first[0].relative) and found.first[0].path.startswith("decoder.layers.2")
    json.dumps(as_map(found), allow_nan=False)


def test_runs_of_other_steps_cannot_be_compared(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ScopeError, match="no step in common .steps 1 to 40 and steps 100 to 109."):
        compared(base, tmp_path, replace(SHAPE, first_step=100, steps=10))


def test_what_one_run_alone_has_is_counted(base: Path, tmp_path: Path) -> None:
    found = compared(base, tmp_path, replace(SHAPE, experts=0))
    assert found.equal and found.only_a == 4 * 4 and found.only_b == 0
    assert "16 statistics are only in the first run" in text(found)


def test_values_that_lack_parts_are_left_out_and_counted(base: Path, tmp_path: Path) -> None:
    """One of two nodes is gone: no value is whole, and nothing is said to be equal that was not compared."""
    write_run(tmp_path, replace(SHAPE, nodes=2), extras=False)
    with open_recording(tmp_path) as whole:
        whole.files.nodes()[1].unlink()
    with open_recording(base) as a, open_recording(tmp_path) as b:
        found = compare(a, b)
    assert found.left_out > 0 and found.values == 0 and not found.equal and as_map(found)["equal"] is False
    assert "no statistic could be compared" in text(found)
    alone = replace(found, first_loss=None)
    assert not alone.equal and text(alone).startswith("losses are equal, but no statistic could be compared")
    assert "lack parts and were left out" in text(found)


@pytest.mark.parametrize("interval", [9, 0], ids=["other steps", "none"])
def test_runs_without_common_samples_are_not_equal(interval: int, base: Path, tmp_path: Path) -> None:
    """Nor is a run without statistics equal to one that has some; two of them are, by their losses."""
    found = compared(base, tmp_path, replace(SHAPE, interval=interval))
    assert found.first_loss is None and found.values == found.samples == 0 and not found.equal
    expected = "losses are equal, but no statistic could be compared: 40 common steps, 0 of them"
    assert text(found).startswith(expected)
    with open_recording(tmp_path) as alone:
        assert compare(alone, alone).equal


def test_a_difference_of_elements_is_called_so() -> None:
    """The number of a vector is one of its elements, or their sum."""
    sides: dict[str, Any] = {
        "step": 1,
        "path": "decoder.layers.0",
        "statistic": "outlier_channels",
        "a": 6.5,
        "b": 6.0,
    }
    assert _numbers(Difference(**sides, relative=0.78)) == "6.5 and 6.0 (relative 0.78 of its elements)"
    assert _numbers(Difference(**sides, relative=0.5 / 6.5)) == "6.5 and 6.0 (relative 0.0769)"


def test_relative_differences() -> None:
    assert difference(2.0, 2.0) == difference(math.nan, math.nan) == 0.0
    assert difference(math.inf, math.inf) == 0.0
    assert difference(1.0, 2.0) == difference(2.0, 1.0) == 0.5
    assert math.isinf(difference(1.0, math.nan)) and math.isinf(difference(math.inf, 1.0))
    assert difference(0.0, 1e-30) == 1.0
