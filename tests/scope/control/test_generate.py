"""Generation equals an independent computation in every layout, and training afterwards is as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import run_ranks

CASES = "tests.scope.control.generate_cases"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
LAYOUTS = {
    "tp": f"--tensor-model-parallel-size 2 --sequence-parallel {DROPOUT}",
    "pp": f"--pipeline-model-parallel-size 2 {DROPOUT}",
    "cp": f"--context-parallel-size 2 {DROPOUT}",
    "dp": f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {DROPOUT}",
    "vpp": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4",
}


def _expected(tmp_path: Path) -> list[dict[str, Any]]:
    # Two ranks, as the layouts have: weights are drawn alike.
    found: list[dict[str, Any]] = run_ranks(2, f"{CASES}:oracle", str(tmp_path), timeout=240)
    tokens: list[dict[str, Any]] = found[0]["tokens"]
    return tokens


def _equal(made: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(made) == len(expected) == 4
    for ours, theirs in zip(made, expected, strict=True):
        assert ours["id"] == theirs["id"] and ours["top_ids"] == theirs["top_ids"]
        assert np.allclose(ours["top_probabilities"], theirs["top_probabilities"], rtol=1e-4)
        assert np.isclose(ours["entropy"], theirs["entropy"], rtol=1e-4)
        attention = ours["attention"]["1"]
        assert sorted(attention) == ["0", "1", "2", "3"]
        for head, weights in attention.items():
            assert np.allclose(weights, theirs["attention"][int(head)], rtol=1e-3, atol=1e-6)


def _layouts(tmp_path: Path, names: list[str]) -> None:
    expected = _expected(tmp_path / "oracle")
    flags = {name: LAYOUTS[name] for name in names}
    found = run_ranks(2, f"{CASES}:layouts", str(tmp_path / "made"), "small", flags, timeout=400)
    drawn = {str(each["drawn"]) for rank in found for each in rank.values()}
    assert len(drawn) == 1, "the same draws in every layout and on every rank"
    for rank in found:
        for name, each in rank.items():
            assert each["untouched"] and all(each["same"]), name
            _equal(each["made"]["tokens"], expected)
            assert each["told"] == [token["id"] for token in each["made"]["tokens"]]
            assert each["text"] == " ".join(map(str, each["drawn"]))


def test_equals_the_oracle_and_leaves_no_trace(tmp_path: Path) -> None:
    _layouts(tmp_path, ["tp"])


@pytest.mark.daily
def test_in_every_layout(tmp_path: Path) -> None:
    _layouts(tmp_path, ["tp", "pp", "cp", "dp"])


@pytest.mark.daily
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("small", {"vpp": LAYOUTS["vpp"]}),
        (
            "small",
            {"fp8": "--bf16 --fp8-recipe delayed --fp8-amax-history-len 4 --no-first-last-layers-bf16"},
        ),
        (
            "mixture",
            {"dp": "", "ep": "--expert-model-parallel-size 2", "pp": "--pipeline-model-parallel-size 2"},
        ),
    ],
    ids=["vpp", "fp8", "experts"],
)
def test_other_models_leave_no_trace(tmp_path: Path, model: str, flags: dict[str, str]) -> None:
    case = f"{CASES}:layouts" if "vpp" not in flags else f"{CASES}:deep_layouts"
    found = run_ranks(2, case, str(tmp_path), model, flags, timeout=400)
    made = {
        str([token["id"] for token in each["made"]["tokens"]]) for rank in found for each in rank.values()
    }
    assert len(made) == 1
    for rank in found:
        for name, each in rank.items():
            assert each["untouched"] and all(each["same"]), name


def test_requests_that_make_no_sense_are_refused() -> None:
    (found,) = run_ranks(1, f"{CASES}:refused", timeout=240)
    parts = [
        "both or neither",
        "both or neither",
        "at least one token id",
        "below 128",
        "expected at most 32 together",
        "found n: 0",
        "found temperature: -1",
        "found top_k: 'all'",
        "expected a map with layers",
        "found layers: [2]; expected a list of numbers from 0 to 1",
        "found heads: [4]; expected a list of numbers from 0 to 3",
        "found 'beam' for generate",
        "found attention of some 120 weights; expected at most 100",
    ]
    assert len(found) == len(parts)
    for said, part in zip(found, parts, strict=True):
        assert part in said, (said, part)
