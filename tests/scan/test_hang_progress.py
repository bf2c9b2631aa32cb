"""What is slow is no hang: members that get on, and one that has only just come."""

from __future__ import annotations

from typing import Any

from mt_megatron.scan.hangs import OpenOperation, RankEnd, find_hang

SECOND = 1_000_000_000
NOW = 100 * SECOND
GROUP = ("dp", (0, 1))


def operation(seconds: float) -> OpenOperation:
    """All-reduce number 7 of the group, open for so long."""
    begin = NOW - int(seconds * SECOND)
    return OpenOperation(key=GROUP, op="all_reduce", seq=7, begin=begin, iteration=3, is_transfer=False)


def end(rank: int, *, last_event: float, entered: bool = True, waits: float | None = None) -> RankEnd:
    return RankEnd(
        rank=rank,
        last_seen=NOW,
        last_event=NOW - int(last_event * SECOND),
        waiting=None if waits is None else operation(waits),
        inside=None,
        reached={GROUP: 7 if entered else 6},
        step=3,
        note=None,
    )


def hang_of(*ends: RankEnd) -> Any:
    return find_hang({one.rank: one for one in ends}, {}, now=NOW)


def test_a_member_that_does_nothing_hangs() -> None:
    found = hang_of(end(0, last_event=6, waits=6), end(1, last_event=7, entered=False))
    assert found is not None and found.ranks == (1,) and found.details["seq"] == 7


def test_a_member_that_gets_on_is_slow() -> None:
    assert hang_of(end(0, last_event=6, waits=6), end(1, last_event=0.5, entered=False)) is None


def test_an_operation_that_all_are_in_hangs_from_the_last_arrival_on() -> None:
    assert hang_of(end(0, last_event=9, waits=9), end(1, last_event=1, waits=1)) is None
    found = hang_of(end(0, last_event=9, waits=9), end(1, last_event=6, waits=6))
    assert found is not None and found.ranks == (0, 1)
