"""Every message arrives once, whole and in order: random ones, from many threads, of two jobs at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launch import run_ranks


def traffic(messages: int, helper: str, timeout: float) -> dict[str, float]:
    """Sums over 4 ranks of 2 jobs, 4 producer threads each."""
    found = run_ranks(4, "tests.comm.traffic:two_jobs", 20261124, messages, 4, helper, timeout=timeout)
    assert [each["wrong"] for each in found] == [0] * 4
    assert [each["received"] for each in found] == [messages] * 4
    assert all(each["in place"] > messages / 5 for each in found)
    return {
        "messages": sum(each["received"] for each in found),
        "MB": round(sum(each["bytes"] for each in found) / 1e6),
        "seconds": round(max(each["seconds"] for each in found), 1),
        "wrong": sum(each["wrong"] for each in found),
    }


def test_random_messages_of_two_jobs(helper: str) -> None:
    traffic(400, helper, timeout=90)


@pytest.mark.soak
def test_a_hundred_thousand_messages(helper: str, record_property: Callable[[str, object], None]) -> None:
    for name, value in traffic(25_000, helper, timeout=1500).items():
        record_property(name, value)
