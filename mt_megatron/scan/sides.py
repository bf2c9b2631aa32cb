"""One rank's side of every communication: when it was ready, and when it could go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .exchanges import Edge, Group, RankExchanges, SideLog
from .intervals import Times
from .records import ASYNC, KIND, OPEN, WAIT
from .segments import RankTrace


def rank_exchanges(rank: int, trace: RankTrace, to_reference: Callable[[Times], Times]) -> RankExchanges:
    """The communications of one rank. ``to_reference`` puts its times on the common clock."""
    spans = trace.spans[trace.spans["end"] != OPEN]
    collective = spans[(spans["kind"] == KIND["collective"]) & (spans["group"] > 0)]
    groups: dict[Group, SideLog] = {}
    for number in np.unique(collective["group"]):
        group = trace.groups.get(int(number))
        if group is None or len(group.ranks) < 2:
            continue
        rows = collective[collective["group"] == number]
        log = _side(_whole_operations(rows), trace.strings, to_reference)
        if len(log.key):
            groups[group.name, tuple(group.ranks)] = log
    sends, receives = _transfers(rank, trace, spans, to_reference)
    return RankExchanges(rank=rank, groups=groups, sends=sends, receives=receives)


def _transfers(
    rank: int, trace: RankTrace, spans: NDArray[np.void], to_reference: Callable[[Times], Times]
) -> tuple[dict[Edge, SideLog], dict[Edge, SideLog]]:
    p2p = spans[(spans["kind"] == KIND["p2p"]) & (spans["peer"] >= 0)]
    if not len(p2p):
        return {}, {}
    # Those of one call have the same times: the end is that of the slowest of them.
    order = np.lexsort((p2p["peer"], p2p["end"], p2p["begin"]))
    p2p = p2p[order]
    alone = np.ones(len(p2p), dtype=bool)
    same = (p2p["begin"][1:] == p2p["begin"][:-1]) & (p2p["end"][1:] == p2p["end"][:-1])
    same &= p2p["peer"][1:] != p2p["peer"][:-1]
    alone[1:] &= ~same
    alone[:-1] &= ~same
    table = np.zeros(1 << 16, dtype=bool)
    table[: len(trace.strings)] = [text.split("_")[0] == "send" for text in trace.strings]
    is_send = table[p2p["name"]]
    sends: dict[Edge, SideLog] = {}
    receives: dict[Edge, SideLog] = {}
    for peer in np.unique(p2p["peer"]):
        for sending, logs in ((True, sends), (False, receives)):
            rows = (p2p["peer"] == peer) & (is_send == sending)
            if not rows.any():
                continue
            chosen = _numbered(p2p[rows])
            log = _side(chosen, ["p2p"] * len(trace.strings), to_reference, shared=~alone[rows])
            logs[(rank, int(peer)) if sending else (int(peer), rank)] = log
    return sends, receives


@dataclass(frozen=True, kw_only=True)
class _Operations:
    rows: NDArray[np.void]
    begin: Times
    end: Times
    waited: NDArray[np.bool_]


def _numbered(rows: NDArray[np.void]) -> _Operations:
    return _Operations(rows=rows, begin=_begin(rows), end=_end(rows), waited=(rows["flags"] & ASYNC) == 0)


def _whole_operations(rows: NDArray[np.void]) -> _Operations:
    """Starts joined with their waits; starts that nobody waited for are left out."""
    background = (rows["flags"] & (ASYNC | WAIT)) != 0
    if not background.any():
        return _numbered(rows)
    starts = rows[(rows["flags"] & ASYNC) != 0]
    waits = rows[(rows["flags"] & WAIT) != 0]
    starts = starts[np.unique(starts["seq"], return_index=True)[1]]
    waits = waits[np.unique(waits["seq"], return_index=True)[1]]
    _, at, of = np.intersect1d(starts["seq"], waits["seq"], return_indices=True)
    starts, waits = starts[at], waits[of]
    plain = rows[~background]
    timed = starts["device_end"] > 0
    wait_ns = waits["end"] - waits["begin"]
    length = np.maximum(waits["end"] - starts["begin"], 1)
    end = np.where(timed, starts["device_end"], waits["end"])
    joined = _Operations(
        rows=np.concatenate((plain, starts)),
        begin=np.concatenate((_begin(plain), _begin(starts))),
        end=np.concatenate((_end(plain), end)).astype(np.int64),
        # A wait that took no time says that it was over before, not when.
        waited=np.concatenate((np.ones(len(plain), dtype=bool), timed | (wait_ns > 0.05 * length))),
    )
    order = np.argsort(joined.rows["seq"], kind="stable")
    return _Operations(
        rows=joined.rows[order], begin=joined.begin[order], end=joined.end[order], waited=joined.waited[order]
    )


def _begin(rows: NDArray[np.void]) -> Times:
    return np.where(rows["device_end"] > 0, rows["device_begin"], rows["begin"]).astype(np.int64)


def _end(rows: NDArray[np.void]) -> Times:
    return np.where(rows["device_end"] > 0, rows["device_end"], rows["end"]).astype(np.int64)


def _side(
    operations: _Operations,
    strings: Sequence[str],
    to_reference: Callable[[Times], Times],
    shared: NDArray[np.bool_] | None = None,
) -> SideLog:
    rows = operations.rows
    octaves = np.rint(2.0 * np.log2(np.maximum(rows["bytes"], 1)))
    size = np.where(rows["bytes"] > 0, octaves, -1).astype(np.int64)
    combined = rows["name"].astype(np.int64) * 1024 + size + 1
    distinct, label = np.unique(combined, return_inverse=True)
    labels = [(strings[each // 1024], int(each % 1024) - 1) for each in distinct.tolist()]
    return SideLog(
        key=rows["seq"].astype(np.int64),
        iteration=rows["iteration"].astype(np.int64),
        begin=to_reference(operations.begin),
        end=to_reference(operations.end),
        label=label.astype(np.int64),
        labels=labels,
        shared=np.zeros(len(rows), dtype=bool) if shared is None else shared,
        waited=operations.waited,
    )
