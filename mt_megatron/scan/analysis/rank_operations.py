"""One rank's side of every communication: when it was ready, and when it could go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.format.records import ASYNC, KIND, OPEN, WAIT
from mt_megatron.scan.format.segments import RankTrace

from .intervals import Times
from .matched_ops import Edge, Group, RankExchanges, SideLog

ToReference = Callable[[Times], Times]


def rank_exchanges(rank: int, trace: RankTrace, to_reference: ToReference) -> RankExchanges:
    """The communications of one rank. ``to_reference`` puts its times on the common clock."""
    spans = trace.spans
    kind, ended = spans["kind"], spans["end"] != OPEN
    at = np.flatnonzero((kind == KIND["collective"]) & ended)
    number = spans["group"][at]
    # Sorted by group once: then each group is a slice.
    order = np.argsort(number, kind="stable")
    at, number = at[order], number[order]
    distinct, starts = np.unique(number, return_index=True)
    stops = np.append(starts, len(at))[1:]
    groups: dict[Group, SideLog] = {}
    for each, start, stop in zip(distinct.tolist(), starts.tolist(), stops.tolist(), strict=True):
        group = trace.groups.get(each)
        if group is None or len(group.ranks) < 2:
            continue
        operations = _whole(_gathered(spans, at[start:stop]))
        if len(operations.seq):
            groups[group.name, tuple(group.ranks)] = _side(operations, trace.strings, to_reference)
    sends, receives = _transfers(rank, trace, np.flatnonzero((kind == KIND["p2p"]) & ended), to_reference)
    return RankExchanges(rank=rank, groups=groups, sends=sends, receives=receives)


def _transfers(
    rank: int, trace: RankTrace, at: NDArray[np.int64], to_reference: ToReference
) -> tuple[dict[Edge, SideLog], dict[Edge, SideLog]]:
    peers = trace.spans["peer"][at]
    at, peers = at[peers >= 0], peers[peers >= 0]
    found = _gathered(trace.spans, at)
    # Those of one call have the same times: the end is that of the slowest of them.
    order = np.lexsort((peers, found.end, found.begin))
    found, peers = found.take(order), peers[order]
    same = (found.begin[1:] == found.begin[:-1]) & (found.end[1:] == found.end[:-1])
    same &= peers[1:] != peers[:-1]
    found.shared[1:] |= same
    found.shared[:-1] |= same
    table = np.zeros(1 << 16, dtype=bool)
    table[: len(trace.strings)] = [text.split("_")[0] == "send" for text in trace.strings]
    is_send = table[found.name]
    sends: dict[Edge, SideLog] = {}
    receives: dict[Edge, SideLog] = {}
    nameless = ["p2p"] * len(trace.strings)
    for peer in np.unique(peers).tolist():
        for sending, logs in ((True, sends), (False, receives)):
            rows = np.flatnonzero((peers == peer) & (is_send == sending))
            if len(rows):
                log = _side(_whole(found.take(rows)), nameless, to_reference)
                logs[(rank, peer) if sending else (peer, rank)] = log
    return sends, receives


@dataclass(frozen=True, kw_only=True)
class _Operations:
    """Columns [operations]."""

    begin: Times
    end: Times
    size: NDArray[np.int64]
    seq: NDArray[np.int64]
    iteration: NDArray[np.int64]
    name: NDArray[np.uint16]
    flags: NDArray[np.uint16]
    timed: NDArray[np.bool_]
    """Whether the times are the device's."""

    shared: NDArray[np.bool_]
    waited: NDArray[np.bool_]

    def take(self, at: NDArray[np.int64]) -> _Operations:
        return _Operations(**{each.name: getattr(self, each.name)[at] for each in fields(self)})

    def then(self, other: _Operations) -> _Operations:
        parts = {
            each.name: np.concatenate((getattr(self, each.name), getattr(other, each.name)))
            for each in fields(self)
        }
        return _Operations(**parts)


def _gathered(spans: NDArray[np.void], at: NDArray[np.int64]) -> _Operations:
    begin, end, device_end = spans["begin"][at], spans["end"][at], spans["device_end"][at]
    timed = device_end > 0
    if timed.any():
        begin = np.where(timed, spans["device_begin"][at], begin)
        end = np.where(timed, device_end, end)
    flags = spans["flags"][at]
    return _Operations(
        begin=begin,
        end=end,
        size=spans["bytes"][at],
        seq=spans["seq"][at].astype(np.int64),
        iteration=spans["iteration"][at].astype(np.int64),
        name=spans["name"][at],
        flags=flags,
        timed=timed,
        shared=np.zeros(len(at), dtype=bool),
        waited=(flags & ASYNC) == 0,
    )


def _whole(found: _Operations) -> _Operations:
    """Starts joined with their waits; starts that nobody waited for are left out."""
    background = (found.flags & (ASYNC | WAIT)) != 0
    if not background.any():
        return found
    starts = _first_of_each(found.take(np.flatnonzero((found.flags & ASYNC) != 0)))
    waits = _first_of_each(found.take(np.flatnonzero((found.flags & WAIT) != 0)))
    _, at, of = np.intersect1d(starts.seq, waits.seq, assume_unique=True, return_indices=True)
    starts, waits = starts.take(at), waits.take(of)
    # On a device the transfer runs in a stream of its own: the start's time is that of its launch, and the
    # stream that waits stands until it is over. A wait that the host alone timed says nothing of that.
    told = waits.timed | ~starts.timed
    length = np.maximum(waits.end - starts.begin, 1)
    # A wait that took no time says that it was over before, not when.
    waited = told & (waits.end - waits.begin > 0.05 * length)
    joined = {each.name: getattr(starts, each.name) for each in fields(starts)}
    joined.update(
        end=np.where(told, waits.end, starts.end), waited=waited, shared=starts.shared | waits.shared
    )
    whole = found.take(np.flatnonzero(~background)).then(_Operations(**joined))
    return whole.take(np.argsort(whole.seq, kind="stable"))


def _first_of_each(found: _Operations) -> _Operations:
    return found.take(np.unique(found.seq, return_index=True)[1])


def _side(found: _Operations, strings: Sequence[str], to_reference: ToReference) -> SideLog:
    known = np.maximum(found.size, 1)
    octaves = np.where(found.size > 0, np.rint(2.0 * np.log2(known)), -1).astype(np.int64)
    distinct, label = np.unique(found.name.astype(np.int64) * 1024 + octaves + 1, return_inverse=True)
    labels = [(strings[each // 1024], int(each % 1024) - 1) for each in distinct.tolist()]
    return SideLog(
        key=found.seq,
        iteration=found.iteration,
        begin=to_reference(found.begin),
        end=to_reference(found.end),
        label=label.astype(np.int64),
        labels=labels,
        shared=found.shared,
        waited=found.waited,
    )
