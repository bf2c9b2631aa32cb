"""What is slow is no hang: members that get on, and one that has only just come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mt_megatron.scan.diagnose.hangs import find_hang
from mt_megatron.scan.diagnose.rank_ends import OpenOperation, Pace, RankEnd, processors_used
from mt_megatron.scan.format.records import COUNTER, OPEN, SPAN
from mt_megatron.scan.format.segments import RankTrace

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


def test_who_computes_may_take_some_times_as_long_as_usual() -> None:
    """A loaded machine: 2 s without an event are usual there, and 9 s no hang while it computes."""
    waits, busy = end(0, last_event=9, waits=9), replace(end(1, last_event=9, entered=False), processors=0.4)
    assert hang_of(waits, replace(busy, usual_gap=2 * SECOND)) is None
    for hung in (
        replace(busy, usual_gap=SECOND),  # longer than some times the usual
        replace(busy, usual_gap=2 * SECOND, processors=0.01),  # it does nothing
        replace(busy, usual_gap=2 * SECOND, processors=float("nan")),
        replace(busy, usual_gap=2 * SECOND, last_seen=NOW - 9 * SECOND),  # it is gone
    ):
        found = hang_of(waits, hung)
        assert found is not None and found.ranks == (1,)
    long = end(0, last_event=90, waits=90)
    for_ever = replace(end(1, last_event=90, entered=False), processors=1.0, usual_gap=60 * SECOND)
    assert hang_of(long, for_ever) is not None, "at some time patience ends"


@pytest.mark.parametrize("seconds", [4.1, 4.9, 5.1, 9.0])
def test_who_came_a_little_later_and_waits_for_the_stopped_one_is_not_named_with_it(seconds: float) -> None:
    """DP 2 x TP 2, rank 2 is stopped: 0 waits for it, 3 too but not for quite as long, and 1 waits for 3."""
    dp = {rank: ("dp", (rank % 2, rank % 2 + 2)) for rank in range(4)}
    late = {rank: replace(operation(9.5), key=dp[rank]) for rank in (0, 1)}
    late[3] = replace(operation(seconds), key=("tp", (2, 3)))
    ends = []
    for rank in range(4):
        waiting = late.get(rank)
        since = 9.6 if waiting is None else (NOW - waiting.begin) / SECOND
        reached = {dp[rank]: 6 if rank > 1 else 7, ("tp", (2, 3)): 7 if rank == 3 else 6}
        gone = 9 * SECOND if rank == 2 else 0
        one = end(rank, last_event=since)
        ends.append(replace(one, waiting=waiting, reached=reached, last_seen=NOW - gone))
    found = hang_of(*ends)
    assert found is not None and found.ranks == (2,) and found.confidence > 0.9


def test_the_usual_pause_is_that_of_the_last_steps_but_the_newest() -> None:
    pace = Pace()
    assert pace.usual_ns == 0
    spans = np.zeros(1, dtype=SPAN)
    for step in range(1, 31):
        spans["iteration"], spans["begin"] = step, step * 10 * SECOND
        # A checkpoint now and then, and the newest step, say nothing of what is usual.
        spans["end"] = spans["begin"] + (9 if step in (20, 30) else 2) * SECOND
        pace.feed(spans)
    assert pace.usual_ns == 8 * SECOND, "from the end of a step to the next one's begin"
    spans["end"] = OPEN
    pace.feed(spans)
    assert pace.usual_ns == 8 * SECOND


def test_processors_in_use_are_counted_since_the_last_event() -> None:
    rows = np.zeros(20, dtype=COUNTER)
    rows["time"] = np.arange(20) * SECOND // 2
    rows["name"] = 1
    rows["value"] = np.maximum(rows["time"].astype(float) - 5 * SECOND, 0.0) * 0.5
    trace = RankTrace(
        meta={}, strings=["", "process_cpu_ns"], groups={}, spans=np.zeros(0, SPAN), counters=rows,
        pings=np.zeros(0, SPAN), notes=[],
    )  # fmt: skip
    assert processors_used(trace, 5 * SECOND) == pytest.approx(0.5)
    assert processors_used(trace, 0) == pytest.approx(0.5 * 4.5 / 9.5)
    assert np.isnan(processors_used(trace, 9 * SECOND)) and np.isnan(
        processors_used(replace(trace, strings=[""]), 0)
    )


def test_an_operation_that_all_are_in_hangs_from_the_last_arrival_on() -> None:
    assert hang_of(end(0, last_event=9, waits=9), end(1, last_event=1, waits=1)) is None
    found = hang_of(end(0, last_event=9, waits=9), end(1, last_event=6, waits=6))
    assert found is not None and found.ranks == (0, 1)


def test_of_members_that_are_all_in_it_the_silent_one_hangs() -> None:
    gone = replace(end(1, last_event=9, waits=9), last_seen=NOW - 9 * SECOND)
    found = hang_of(end(0, last_event=9, waits=9), gone)
    assert found is not None and found.ranks == (1,)
    both = replace(end(0, last_event=9, waits=9), last_seen=NOW - 9 * SECOND)
    found = hang_of(both, gone, replace(end(2, last_event=1), reached={}))
    assert found is not None and found.ranks == (0, 1), (
        "of two that are silent neither is known to be the first"
    )


def test_a_call_that_waits_for_two_is_held_up_by_either() -> None:
    """Rank 0 sends to rank 1, which has come, and receives from rank 2, which has not."""
    edge = OpenOperation(
        key=("edge", (2, 0)), op="recv", seq=4, begin=NOW - 9 * SECOND, iteration=3, is_transfer=True
    )
    waits = replace(end(0, last_event=9, waits=9), beside=(edge,))
    behind = replace(end(2, last_event=9), reached={("edge", (2, 0)): 3})
    found = hang_of(waits, end(1, last_event=1), behind)
    assert found is not None and found.ranks == (2,)
