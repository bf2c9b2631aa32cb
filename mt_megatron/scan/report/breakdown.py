"""Where the time of a step goes: compute, moving bytes, waiting for others, pipeline bubble, data ...

Whether a rank in a communication waits or moves bytes is only known with the other sides: bytes can
move from the moment the last of them has begun. Times are the device's where it was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.intervals import Cover, Times
from mt_megatron.scan.format.records import ASYNC, KIND, OPEN, WAIT
from mt_megatron.scan.format.segments import RankTrace

from .data import CATEGORIES, Breakdown

_SEQ_BITS = 31


class Meetings:
    """Numbers for the groups and edges of a run, and when the last side of each operation arrived."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._keys: list[NDArray[np.int64]] = []
        self._begins: list[Times] = []
        self._sorted: NDArray[np.int64] | None = None
        self._latest: Times = np.empty(0, dtype=np.int64)
        self._sides: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def number(self, key: tuple[object, ...]) -> int:
        """The same for equal groups or edges."""
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def arrive(self, keys: NDArray[np.int64], begins: Times) -> None:
        """One rank's operations: it was ready at ``begins``."""
        self._keys.append(keys)
        self._begins.append(begins)

    def last_arrival(self, keys: NDArray[np.int64]) -> tuple[Times, NDArray[np.int64]]:
        """Per key: when the last side was ready, and how many sides are known. After the last ``arrive``."""
        if self._sorted is None:
            every = np.concatenate(self._keys) if self._keys else np.empty(0, dtype=np.int64)
            begins = np.concatenate(self._begins) if self._begins else np.empty(0, dtype=np.int64)
            self._keys, self._begins = [], []
            order = np.argsort(every, kind="stable")
            every, begins = every[order], begins[order]
            first = np.flatnonzero(np.concatenate((np.ones(min(1, len(every)), bool), np.diff(every) != 0)))
            self._sorted = every[first]
            if len(every):
                self._latest = np.maximum.reduceat(begins, first)
                self._sides = np.diff(np.concatenate((first, [len(every)])))
        at = np.searchsorted(self._sorted, keys)
        there = np.minimum(at, max(0, len(self._sorted) - 1))
        if not len(self._sorted):
            return np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
        same = (self._sorted[there] == keys) & (keys > 0)
        return np.where(same, self._latest[there], 0), np.where(same, self._sides[there], 0)


@dataclass(frozen=True, kw_only=True)
class Look:
    """One rank's spans of the steps looked at, on the reference clock."""

    rank: int
    steps: NDArray[np.int64]
    begin: Times
    """Of each step."""

    end: Times
    whole: NDArray[np.bool_]
    """Per step: whether it ended; one that did not lasts to the last thing that the rank wrote."""

    kind: NDArray[np.uint8]
    first: Times
    """Begin of each span."""

    last: Times
    key: NDArray[np.int64]
    """Of communications with a number: what their sides share; else 0."""

    spans: NDArray[np.void]
    """The same spans as recorded; their times are not put right."""


def look(
    rank: int,
    trace: RankTrace,
    wanted: NDArray[np.int64],
    to_reference: Callable[[Times], Times],
    meetings: Meetings,
) -> Look:
    """The spans of the steps ``wanted``; its communications are entered into ``meetings``."""
    spans = trace.spans[np.isin(trace.spans["iteration"], wanted)]
    unfinished = spans["end"] == OPEN
    timed = (spans["device_begin"] != 0) & ~unfinished
    first = to_reference(np.where(timed, spans["device_begin"], spans["begin"]).astype(np.int64))
    ends = np.where(unfinished, np.maximum(spans["begin"], _last_written(trace)), spans["end"])
    last = to_reference(np.where(timed, spans["device_end"], ends).astype(np.int64))
    key = _keys(rank, trace, spans, meetings)
    ready = (key > 0) & ((spans["flags"] & WAIT) == 0)
    meetings.arrive(key[ready], first[ready])
    chosen = spans["kind"] == KIND["step"]
    return Look(
        rank=rank,
        steps=spans["iteration"][chosen].astype(np.int64),
        begin=first[chosen],
        end=last[chosen],
        whole=~unfinished[chosen],
        kind=spans["kind"],
        first=first,
        last=last,
        key=key,
        spans=spans,
    )


def waits(seen: Look, meetings: Meetings) -> tuple[Times, NDArray[np.bool_]]:
    """Per span: until when it waited for another side (its begin where it did not), and whether that is
    known."""
    arrival, sides = meetings.last_arrival(seen.key)
    known = sides > 1
    # A start in the background does not wait, however long it takes to issue.
    waited = known & ((seen.spans["flags"] & ASYNC) == 0)
    until = np.where(waited, np.clip(arrival, seen.first, seen.last), seen.first)
    # What never ends moves nothing.
    return np.where(seen.spans["end"] == OPEN, seen.last, until), known


def breakdown(looks: Sequence[Look], meetings: Meetings) -> Breakdown:
    """Shares of the steps that ``looks`` hold, per rank and together."""
    totals: dict[int, NDArray[np.float64]] = {}
    lengths: dict[int, float] = {}
    communication = matched = 0.0
    steps: set[int] = set()
    for seen in looks:
        begin, end = seen.begin[seen.whole], seen.end[seen.whole]
        length = float((end - begin).sum())
        if length <= 0:
            continue
        totals[seen.rank] = _parts(seen, meetings)
        lengths[seen.rank] = length
        steps.update(seen.steps[seen.whole].tolist())
        which = _is(seen, "collective", "p2p") & (seen.spans["end"] != OPEN)
        _, known = waits(seen, meetings)
        spent = (seen.last - seen.first)[which]
        communication += float(spent.sum())
        matched += float(spent[known[which]].sum())
    if not totals:
        return Breakdown()
    whole = sum(lengths.values())
    return Breakdown(
        steps=tuple(sorted(steps)),
        seconds=whole / sum(int(seen.whole.sum()) for seen in looks) / 1e9,
        overall=tuple((np.sum(list(totals.values()), axis=0) / whole).tolist()),
        ranks={rank: tuple((parts / lengths[rank]).tolist()) for rank, parts in totals.items()},
        matched=matched / communication if communication else 0.0,
    )


def _parts(seen: Look, meetings: Meetings) -> NDArray[np.float64]:
    """ns per category, summed over the steps; what lies within several counts for the first of: bubble,
    waiting, moving, data, checkpoint, pause."""
    until, _ = waits(seen, meetings)
    p2p, collective = _is(seen, "p2p"), _is(seen, "collective")
    layers = (
        ("bubble", seen.first[p2p], until[p2p]),
        ("waiting", seen.first[collective], until[collective]),
        ("exposed_communication", *_times(seen, p2p | collective)),
        ("data", *_times(seen, _is(seen, "data"))),
        ("checkpoint", *_times(seen, _is(seen, "checkpoint") & _in_step_thread(seen))),
        ("pause", *_times(seen, _is(seen, "pause"))),
    )
    parts = np.zeros(len(CATEGORIES))
    begins, ends = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    before = 0.0
    first, last = seen.begin[seen.whole], seen.end[seen.whole]
    for name, begin, end in layers:
        begins, ends = np.concatenate((begins, begin)), np.concatenate((ends, end))
        covered = float(Cover(begins, ends).within(first, last).sum())
        parts[CATEGORIES.index(name)] = covered - before
        before = covered
    parts[CATEGORIES.index("compute")] = float((last - first).sum()) - before
    return parts


def _last_written(trace: RankTrace) -> int:
    times = [trace.spans["begin"], trace.spans["end"], trace.counters["time"]]
    return max(int(each.max(initial=0)) for each in times)


def _in_step_thread(seen: Look) -> NDArray[np.bool_]:
    """A checkpoint that is written in the background keeps nobody from computing."""
    own = np.unique(seen.spans["thread"][seen.kind == KIND["step"]])
    return np.isin(seen.spans["thread"], own)


def _is(seen: Look, *kinds: str) -> NDArray[np.bool_]:
    return np.isin(seen.kind, [KIND[kind] for kind in kinds])


def _times(seen: Look, which: NDArray[np.bool_]) -> tuple[Times, Times]:
    return seen.first[which], seen.last[which]


def _keys(rank: int, trace: RankTrace, spans: NDArray[np.void], meetings: Meetings) -> NDArray[np.int64]:
    numbers = np.zeros(len(spans), dtype=np.int64)
    collective = (spans["kind"] == KIND["collective"]) & (spans["group"] > 0)
    for number in np.unique(spans["group"][collective]).tolist():
        group = trace.groups.get(number)
        if group is not None and len(group.ranks) > 1:
            rows = collective & (spans["group"] == number)
            numbers[rows] = meetings.number((group.name, group.ranks))
    p2p = (spans["kind"] == KIND["p2p"]) & (spans["peer"] >= 0)
    sends = np.zeros(len(spans), dtype=bool)
    for index, text in enumerate(trace.strings):
        if text.startswith("send"):
            sends |= spans["name"] == index
    for peer in np.unique(spans["peer"][p2p]).tolist():
        for sending in (True, False):
            rows = p2p & (spans["peer"] == peer) & (sends == sending)
            if rows.any():
                edge = (rank, peer) if sending else (peer, rank)
                numbers[rows] = meetings.number(("p2p", *edge))
    counted = (numbers > 0) & (spans["seq"] >= 0)
    return np.where(counted, (numbers << _SEQ_BITS) | spans["seq"], 0)
