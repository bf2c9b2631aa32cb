"""A patched function returns memory of its own wherever upstream's does: a caller may write into it."""

from __future__ import annotations

import pytest

from tests.launch import run_ranks
from tests.patches.alias_ranks import NEEDED

RANKS = "tests.patches.alias_ranks"


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    (upstream,) = run_ranks(1, f"{RANKS}:aliases", list(NEEDED))
    (ours,) = run_ranks(1, f"{RANKS}:aliases", None)
    return upstream, ours


def test_no_result_shares_memory_with_an_argument_unless_upstreams_does(
    found: tuple[dict[str, list[str]], dict[str, list[str]]],
) -> None:
    upstream, ours = found
    both = upstream.keys() & ours.keys()
    assert len(both) > 40, "the functions were watched"
    more = {name: sorted({*ours[name]} - {*upstream[name]}) for name in sorted(both)}
    assert not {name: pairs for name, pairs in more.items() if pairs}


def test_the_search_sees_aliases(found: tuple[dict[str, list[str]], dict[str, list[str]]]) -> None:
    upstream, _ = found
    assert upstream["megatron.core.tensor_parallel.mappings:_reduce"] == ["input_ -> result"]
