"""Shared embeddings in the distributed optimizer's buffer: every layout starts, and no other one changes."""

from __future__ import annotations

from tests.launch import run_ranks
from tests.second_lane import DAILY


def test_drawn_layouts_start_and_those_that_started_keep_their_places() -> None:
    drawn = 2500 if DAILY else 500
    [found] = run_ranks(1, "tests.patches.errata.shared_parameters_case:compared", drawn)
    assert not found["refused"] and not found["changed"] and not found["plan"], found
    assert found["start"] >= 0.8 * drawn and found["not"] >= 0.1 * drawn, found


def test_a_bucket_that_is_gathered_already_is_not_gathered_again() -> None:
    """Upstream leaves a gather pending: the next step's ends in an AssertionError."""
    [found] = run_ranks(1, "tests.patches.errata.shared_parameters_case:gathers")
    assert found == {"ours": [0, 1, 2, 3], "upstream": [0, 1, 2, 3, 2]}
