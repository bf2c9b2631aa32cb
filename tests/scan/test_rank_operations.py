"""Begin and end of transfers that run beside the computation, from the times of their starts and waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mt_megatron.scan.analysis.matched_ops import RankExchanges, SideLog
from mt_megatron.scan.analysis.op_table import ExchangeStore
from mt_megatron.scan.analysis.rank_operations import rank_exchanges
from mt_megatron.scan.format.records import ASYNC, KIND, SPAN, WAIT

US = 1_000
LAUNCH, STALLS, OVER = (100, 110), (500, 900), (500, 501)
"""Microseconds from begin to end: of a start; of a wait for a transfer that is under way, and for one that is
over."""


def operation(*parts: tuple[int, tuple[int, int], bool]) -> SideLog:
    """An all-reduce of ``parts`` (flag, times, whether a device timed it), as its rank is analysed."""
    spans = np.zeros(len(parts), dtype=SPAN)
    spans["kind"], spans["name"], spans["seq"], spans["bytes"] = KIND["collective"], 1, 7, 1 << 20
    for span, (flag, (begin, end), is_timed) in zip(spans, parts, strict=True):
        span["flags"] = flag
        # The host only launches.
        span["begin"], span["end"] = (begin * US, (begin + 2) * US) if is_timed else (begin * US, end * US)
        if is_timed:
            span["device_begin"], span["device_end"] = begin * US, end * US
    group = SimpleNamespace(name="dp", ranks=(0, 1))
    trace: Any = SimpleNamespace(spans=spans, groups={0: group}, strings=("", "all_reduce"))
    [log] = rank_exchanges(0, trace, lambda times: times).groups.values()
    return log


@pytest.mark.parametrize("device", [False, True])
def test_the_wait_says_when_a_transfer_beside_the_computation_ended(device: bool) -> None:
    stalls = operation((ASYNC, LAUNCH, device), (WAIT, STALLS, device))
    assert (stalls.begin[0], stalls.end[0], stalls.waited[0]) == (100 * US, 900 * US, True)
    over = operation((ASYNC, LAUNCH, device), (WAIT, OVER, device))
    assert (over.begin[0], over.waited[0]) == (100 * US, False)


def test_a_wait_that_the_host_alone_timed_says_nothing_of_a_device() -> None:
    found = operation((ASYNC, LAUNCH, True), (WAIT, STALLS, False))
    assert (found.begin[0], found.end[0], found.waited[0]) == (100 * US, 110 * US, False)


def test_one_call_that_waits_is_taken_as_it_is() -> None:
    found = operation((0, STALLS, True))
    assert (found.begin[0], found.end[0], found.waited[0]) == (500 * US, 900 * US, True)


def log(iteration: int, count: int) -> SideLog:
    """``count`` transfers of one step that share their calls with others."""
    numbers = np.arange(count, dtype=np.int64)
    return SideLog(
        key=numbers,
        iteration=np.full(count, iteration, dtype=np.int64),
        begin=1_000 * US * (numbers + 1),
        end=1_000 * US * (numbers + 1) + 500 * US,
        label=np.zeros(count, dtype=np.int64),
        labels=[("p2p", 20)],
        shared=np.ones(count, dtype=bool),
        waited=np.ones(count, dtype=bool),
    )


@pytest.mark.parametrize("received", [log(7, 3), log(5, 0)], ids=["of another step", "not waited for"])
def test_transfers_of_which_no_other_side_is_there_are_left_out(received: SideLog) -> None:
    store = ExchangeStore({}, lambda ranks: 0.0)
    store.add(RankExchanges(rank=0, groups={}, sends={(0, 1): log(5, 3)}, receives={}))
    store.add(RankExchanges(rank=1, groups={}, sends={}, receives={(0, 1): received}))
    store.settle()
    assert store.units() == []


def test_transfers_that_share_their_calls_are_kept_where_both_sides_are_there() -> None:
    store = ExchangeStore({}, lambda ranks: 0.0)
    store.add(RankExchanges(rank=0, groups={}, sends={(0, 1): log(5, 3)}, receives={}))
    store.add(RankExchanges(rank=1, groups={}, sends={}, receives={(0, 1): log(5, 3)}))
    store.settle()
    (unit,) = store.units()
    assert unit.ranks == (0, 1) and unit.rows.count.tolist() == [3]
