"""Code of users around the patched layers computes what it computes around upstream's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.patches.model.user_code_ranks import LOSSES, TOKENS

RANKS = "tests.patches.model.user_code_ranks"
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> Found:
    all_of_it: Found = run_ranks(1, f"{RANKS}:everything")[0]
    return all_of_it


@pytest.mark.parametrize("way", ["torch", "torch reentrant", "megatron"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_applied_and_counted_once_by_every_recomputation(
    found: Found, loss: str, way: str
) -> None:
    once, again = (found["checkpointing"][f"{loss} {each}"] for each in ("once", way))
    assert again == once
    assert once["tokens"] == 2 * TOKENS
    assert any(map(any, once["gradient"])), "the loss has a gradient"
