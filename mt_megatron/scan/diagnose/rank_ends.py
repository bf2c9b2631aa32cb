"""Where the trace of one rank ends: what it waits in, what it is in, how far it came.

``Pace``: the rank's usual time between events, and whether it computes now: a slow rank has not hung.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.intervals import Times
from mt_megatron.scan.format.recording_end import Ended, ended_of
from mt_megatron.scan.format.records import KIND, KINDS, OPEN
from mt_megatron.scan.format.segments import RankTrace

_MOST_OPEN = 16

Key = tuple[str, tuple[int, ...]]
"""A group's name and ranks; of a transfer ``send`` or ``recv``, sender and receiver."""


@dataclass(frozen=True, kw_only=True)
class OpenOperation:
    """A communication that has begun and not ended."""

    key: Key
    op: str
    seq: int
    begin: int
    """ns on the common clock."""

    iteration: int
    is_transfer: bool


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """Where a rank's trace ends."""

    rank: int
    last_seen: int
    """ns on the common clock: the last thing it wrote, beats of its recorder included."""

    last_event: int
    """ns on the common clock: the last thing it began or ended."""

    waiting: OpenOperation | None
    """The communication that it is in."""

    inside: str | None
    """The innermost other thing that it is in: ``checkpoint``, ``data`` ..."""

    reached: Mapping[Key, int]
    """Per group or edge the highest number that it has entered."""

    step: int
    """The last iteration of which it wrote."""

    note: Mapping[str, Any] | None
    """Its last note with Python stacks."""

    in_step: bool = False
    """Whether a step of it has begun and not ended."""

    recording_off: bool = False
    """Whether it was told to record nothing, until it is told otherwise."""

    beside: tuple[OpenOperation, ...] = ()
    """Other communications that have not ended: one call may wait for several."""

    ended: Ended | None = None
    """How its recording ended; None while it goes on, and of a rank that was killed."""

    usual_gap: int = 0
    """ns: the longest time without an event in a usual step."""

    processors: float = float("nan")
    """How many it has used since its last event."""

    @property
    def unrecorded(self) -> bool:
        """Whether its tracing failed: what it did since then nobody knows."""
        return self.ended is not None and self.ended.how == "failed"


def rank_end(rank: int, trace: RankTrace, to_reference: Callable[[Times], Times]) -> RankEnd:
    """The end of one rank's trace."""
    spans = trace.spans
    still = spans[spans["end"] == OPEN]
    times = [
        spans["begin"].max(initial=0),
        spans["end"].max(initial=0),
        trace.counters["time"].max(initial=0),
    ]
    last = to_reference(np.array([max(map(int, times)), max(map(int, times[:2]))], dtype=np.int64))
    communicates = np.isin(still["kind"], [KIND["collective"], KIND["p2p"]])
    waiting, inside = None, None
    rows = still[communicates]
    rows = rows[np.argsort(rows["begin"], kind="stable")[::-1]][:_MOST_OPEN]
    begins = to_reference(rows["begin"].astype(np.int64))
    pending = [_operation(rank, row, int(at), trace) for row, at in zip(rows, begins, strict=True)]
    if pending:
        waiting = pending[0]
    others = still[~communicates & (still["kind"] != KIND["step"])]
    if len(others):
        inside = KINDS[int(others[int(np.argmax(others["begin"]))]["kind"])]
    stacks = [note for note in trace.notes if note.get("what") == "stack"]
    levels = [note.get("level") for note in trace.notes if note.get("what") == "level"]
    pace = Pace()
    pace.feed(spans)
    return RankEnd(
        rank=rank,
        last_seen=int(last[0]),
        last_event=int(last[1]),
        waiting=waiting,
        inside=inside,
        reached=_reached(rank, trace),
        step=int(spans["iteration"].max(initial=0)),
        note=stacks[-1] if stacks else None,
        in_step=bool((still["kind"] == KIND["step"]).any()),
        recording_off=levels[-1:] == ["off"],
        beside=tuple(pending[1:]),
        ended=ended_of(trace.notes),
        usual_gap=pace.usual_ns,
        processors=processors_used(trace, max(map(int, times[:2]))),
    )


def _operation(rank: int, row: Any, begin: int, trace: RankTrace) -> OpenOperation:
    number = int(row["name"])
    op = trace.strings[number] if number < len(trace.strings) else "?"
    transfer = int(row["kind"]) == KIND["p2p"]
    return OpenOperation(
        key=_edge(rank, op, int(row["peer"])) if transfer else _group(trace, int(row["group"])),
        op=op,
        seq=int(row["seq"]),
        begin=begin,
        iteration=int(row["iteration"]),
        is_transfer=transfer,
    )


def _edge(rank: int, op: str, peer: int) -> Key:
    return ("edge", (rank, peer) if op.startswith("send") else (peer, rank))


def _group(trace: RankTrace, number: int) -> Key:
    group = trace.groups.get(number)
    return (group.name, tuple(group.ranks)) if group is not None else ("?", ())


def _reached(rank: int, trace: RankTrace) -> dict[Key, int]:
    found: dict[Key, int] = {}
    spans = trace.spans
    at = np.flatnonzero(spans["kind"] == KIND["collective"])
    highest = np.full(1 << 16, -1, dtype=np.int64)
    np.maximum.at(highest, spans["group"][at], spans["seq"][at])
    for number in np.flatnonzero(highest >= 0).tolist():
        key = _group(trace, number)
        found[key] = max(found.get(key, -1), int(highest[number]))
    rows = spans[spans["kind"] == KIND["p2p"]]
    for peer in np.unique(rows["peer"]):
        of_peer = rows[rows["peer"] == peer]
        for number in np.unique(of_peer["name"]):
            op = trace.strings[int(number)] if int(number) < len(trace.strings) else "?"
            key = _edge(rank, op, int(peer))
            found[key] = max(found.get(key, -1), int(of_peer["seq"][of_peer["name"] == number].max()))
    return found


_STEPS = 16
_MOST_SPANS = 5_000
_LEAST_NS = 1_000_000_000


class Pace:
    """The longest time without an event in each of the last steps."""

    def __init__(self) -> None:
        self._last = 0
        self._gaps: dict[int, int] = {}

    def feed(self, spans: NDArray[np.void]) -> None:
        """Take in ``records.SPAN``, later ones than before."""
        spans = spans[-_MOST_SPANS:]
        ended = spans[spans["end"] != OPEN]
        times = np.concatenate([spans["begin"], ended["end"]]).astype(np.int64)
        steps = np.concatenate([spans["iteration"], ended["iteration"]])
        order = np.argsort(times, kind="stable")
        order = order[times[order] > self._last]
        if not len(order):
            return
        times, steps = times[order], steps[order]
        gaps = np.diff(times, prepend=self._last or times[0])
        for step in np.unique(steps).tolist():
            self._gaps[step] = max(self._gaps.get(step, 0), int(gaps[steps == step].max()))
        self._last = int(times[-1])
        for step in sorted(self._gaps)[: -_STEPS - 1]:
            del self._gaps[step]

    @property
    def usual_ns(self) -> int:
        """The median over the last steps but the newest; 0 where there is none."""
        gaps = [self._gaps[step] for step in sorted(self._gaps)[:-1]]
        return int(median(gaps)) if gaps else 0


def processors_used(trace: RankTrace, since: int) -> float:
    """How many processors the rank has used from ``since`` (ns of its clock) on; NaN where that is not known,
    or for less than a second."""
    if "process_cpu_ns" not in trace.strings:
        return float("nan")
    rows = trace.counters[trace.counters["name"] == trace.strings.index("process_cpu_ns")]
    rows = rows[rows["time"] >= since]
    if len(rows) < 2:
        return float("nan")
    first, last = int(np.argmin(rows["time"])), int(np.argmax(rows["time"]))
    length = int(rows["time"][last] - rows["time"][first])
    if length < _LEAST_NS:
        return float("nan")
    return float(rows["value"][last] - rows["value"][first]) / length
