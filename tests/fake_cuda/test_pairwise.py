"""The rows that are run are legal, contain every pair that a legal row can, and are few."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.fake_cuda.layouts import FACTORS, covering, legal, stages
from tests.fake_cuda.pairwise import Row, all_pairs, covering_rows, pairs_of

pytestmark = pytest.mark.daily


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return covering()


def test_every_row_is_complete_and_legal(rows: list[Row]) -> None:
    for row in rows:
        assert list(row) == list(FACTORS) and legal(row), row
        assert all(row[name] in values for name, values in FACTORS.items())


def test_every_legal_pair_is_covered(rows: list[Row]) -> None:
    """Which pairs are legal is found by trying every combination of the factors that rules speak of."""
    ruled = ("build", "world", "tp", "sp", "pp", "vpp", "cp", "experts", "ep", "bias")
    others = {name: values for name, values in FACTORS.items() if name not in ruled}
    neutral = {name: values[0] for name, values in others.items()}
    legal_rows = [
        dict(zip(ruled, values, strict=True))
        for values in itertools.product(*(FACTORS[name] for name in ruled))
        if legal({**neutral, **dict(zip(ruled, values, strict=True))})
    ]
    possible = {pair for row in legal_rows for pair in itertools.combinations(row.items(), 2)}
    values_of = {item for row in legal_rows for item in row.items()}

    def can_be(pair: Any) -> bool:
        names = {name for name, _ in pair}
        if names <= set(ruled):
            return pair in possible or pair[::-1] in possible
        return all(name in others or (name, value) in values_of for name, value in pair)

    expected = {pair for pair in all_pairs(FACTORS) if can_be(pair)}
    covered = set().union(*map(pairs_of, rows))
    assert covered == expected
    assert len(expected) > 800 and len(rows) <= 30, (len(expected), len(rows))


def test_first_middle_and_last_stages_are_among_the_ranks(rows: list[Row]) -> None:
    assert {name for row in rows for name in stages(row)} == {"first", "middle", "last"}
    for row in rows:
        per_stage = row["world"] // row["pp"]
        found = {rank // per_stage for rank in stages(row).values()}
        assert {0, row["pp"] - 1} <= found and max(stages(row).values()) < row["world"]


def test_a_pair_that_no_row_can_contain_is_left_out() -> None:
    factors = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    found = covering_rows(factors, lambda row: not (row.get("a") == 1 and row.get("b") == 1))
    pairs = set().union(*map(pairs_of, found))
    assert (("a", 1), ("b", 1)) not in pairs and len(pairs) == 11
