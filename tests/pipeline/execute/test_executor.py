"""The executor computes to the bit what upstream's schedule of the same placement computes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.pipeline.execute import table

HERE = "tests.pipeline.execute.ranks"
DAILY = bool(os.environ.get("MT_MEGATRON_DAILY"))

TWO_RANKS = [
    table.case(2, 1, "moe"),
    table.case(2, 1, "mtp tied", bf16=True),
    table.case(2, 2, "tied", reduction="overlap"),
]
TWO_MORE = [
    table.case(2, 2, "recompute", microbatches=6),
    table.case(2, 1, "fused mtp"),
    table.case(2, 1, "biased", microbatches=3),
    table.case(2, 2, "grouped", bf16=True),
    table.case(2, 2, "per token", microbatches=2),
    table.case(2, 2, "mtp"),
]
FOUR_RANKS = [
    table.case(4, 1, "mtp"),
    table.case(4, 2, "moe", bf16=True),
    {**table.case(2, 1, "tied", bf16=True, reduction="zero1"), "pp": 2},
    {**table.case(2, 2, "moe", reduction="aligned"), "pp": 2},
    {**table.case(2, 2, "dense"), "pp": 2, "tp": 2, "sequence_parallel": True},
    {**table.case(2, 2, "dense"), "pp": 2, "cp": 2},
]


def require_equal(ranks: list[dict[str, list[str]]], rows: list[dict[str, Any]]) -> int:
    """How many comparisons there were; all of them equal on every rank."""
    assert len(ranks[0]) == sum(len(row["schedules"]) for row in rows)
    for found in ranks:
        assert {label: names for label, names in found.items() if names} == {}
    return len(ranks[0])


def test_two_ranks_equal_upstream() -> None:
    rows = [*TWO_RANKS, *(TWO_MORE if DAILY else ())]
    require_equal(run_ranks(2, f"{HERE}:same_as_upstream", 2, rows), rows)


@pytest.mark.daily
def test_four_ranks_equal_upstream() -> None:
    require_equal(run_ranks(4, f"{HERE}:same_as_upstream", 4, FOUR_RANKS), FOUR_RANKS)


@pytest.mark.soak
@pytest.mark.parametrize("model", table.MODELS)
@pytest.mark.parametrize(("pp", "dp"), table.LAYOUTS)
def test_every_combination_equals_upstream(pp: int, dp: int, model: str, record_property: Any) -> None:
    rows = [row for row in table.combinations(pp, dp) if row["model"] == model]
    assert rows
    ranks = run_ranks(pp * dp, f"{HERE}:same_as_upstream", pp, rows, timeout=1500)
    record_property("comparisons equal to the bit", require_equal(ranks, rows))


DROPOUT = [
    {"model": "recompute", "schedules": ["1f1b", "breadth_first", "zb_h1"], "like": "dense"},
    {"model": "moe", "chunks": 2, "schedules": ["interleaved", "zb_h1"]},
    {"model": "tied", "chunks": 2, "v": True, "schedules": ["zbv", "dualpipev"]},
]


def test_with_dropout_schedules_equal_each_other() -> None:
    """Switched between two steps as well; random states are equal afterwards. Recomputed layers draw what
    they drew before: the model without recomputation has the same gradients."""
    for found in run_ranks(2, f"{HERE}:same_with_dropout", 2, DROPOUT):
        for label, names in found.items():
            if label.endswith("other seed"):
                assert len(names) > 5 and "random" in names, "the comparison sees dropout"
            else:
                assert names == [], label
        assert sum(label.endswith("switched") for label in found) == len(DROPOUT)


@pytest.mark.soak
@pytest.mark.parametrize("model", table.MODELS)
def test_with_dropout_every_model_on_four_ranks(model: str, record_property: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"model": model, "schedules": ["1f1b", "breadth_first", "depth_first", "zb_h1"], "microbatches": 6},
        {
            "model": model,
            "chunks": 2,
            "microbatches": 8,
            "schedules": ["interleaved", "breadth_first", "depth_first", "hybrid:3", "zb_h1"],
        },
        {"model": model, "chunks": 2, "v": True, "microbatches": 8, "schedules": ["zbv", "dualpipev"]},
    ]
    ranks = run_ranks(4, f"{HERE}:same_with_dropout", 4, rows, timeout=1500)
    wrong = {
        label for found in ranks for label, names in found.items() if names and "other seed" not in label
    }
    assert wrong == set()
    record_property("comparisons equal to the bit", sum("other seed" not in label for label in ranks[0]))


@pytest.mark.parametrize(
    ("pp", "models"),
    [
        (2, ["mtp tied"]),
        pytest.param(2, ["dense", "tied", "moe", "mtp", "recompute", "per token"], marks=pytest.mark.daily),
        pytest.param(4, list(table.MODELS), marks=pytest.mark.soak),
    ],
)
def test_a_v_computes_what_a_loop_computes(pp: int, models: list[str], record_property: Any) -> None:
    """From the same weights, against upstream's interleaved schedule; ZBV and DualPipeV to the bit."""
    for found in run_ranks(pp, f"{HERE}:placements", pp, models, 2 * pp, timeout=600):
        for model, result in found.items():
            assert result["differ"] == [], model
            assert result["parameters"] >= 2 * pp * 6
            assert result["error"] < 1e-6, model
            assert result["loop"] == 0.0
        record_property("largest relative error", max(result["error"] for result in found.values()))
