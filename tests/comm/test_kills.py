"""A killed process leaves nothing behind, and its peer names it within 2 s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.comm.kills import shared_memory_mib
from tests.launch import run_ranks

_LIMIT_SECONDS = 2.0
"""On a machine that does nothing else, as for the hundred trials."""

_BUSY_SECONDS = 15.0


def killed(count: int, helper: str, timeout: float, limit: float) -> list[dict[str, Any]]:
    [found] = run_ranks(1, "tests.comm.kills:trials", count, 7, helper, timeout=timeout)
    for each in found:
        assert each["names the victim"] and each["seconds"] < limit and not each["left"], each
        assert "process ended" in each["seen"], each
    return list(found)


def test_either_end_killed_at_random_points(helper: str) -> None:
    found = killed(3, helper, timeout=60, limit=_BUSY_SECONDS)
    assert len(found) == 3


@pytest.mark.soak
def test_a_hundred_kills(helper: str, record_property: Callable[[str, object], None]) -> None:
    before = shared_memory_mib()
    found = killed(100, helper, timeout=500, limit=_LIMIT_SECONDS)
    grown = shared_memory_mib() - before
    victims = Counter(each["victim"] for each in found)
    assert len(victims) == 2
    record_property("trials", len(found))
    record_property("first end killed", victims[0])
    record_property("most seconds until it was named", round(max(each["seconds"] for each in found), 3))
    record_property("names or memory left", sum(len(each["left"]) for each in found))
    record_property("growth of the machine's shared memory, MiB", round(grown, 1))


def test_children_of_a_dead_process_hide_nothing() -> None:
    [found] = run_ranks(1, "tests.comm.kills:children_that_hold_on", "auto", timeout=60)
    assert set(found) == {"forked child", "another program"}
    for each in found.values():
        assert each["child lived"] and each["named"] and each["seconds"] < _BUSY_SECONDS, each
    mapped, said = found["forked child"]["said"].split(" ", 1)
    assert mapped == "False"
    assert said.count("forked from") == 3, said
