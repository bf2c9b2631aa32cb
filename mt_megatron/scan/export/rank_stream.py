"""One rank's records in pieces of whole steps, on the reference clock: what the exports write from.

Memory is bounded by one segment of one rank, whatever the size of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.trace import Trace
from mt_megatron.scan.format.records import OPEN, SPAN
from mt_megatron.scan.format.run_files import segment_paths
from mt_megatron.scan.format.segments import (
    Group,
    damaged_in,
    read_segments,
    readable_segments,
    without_ended,
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which part of a run to export; None: all."""

    ranks: frozenset[int] | None = None
    first_step: int | None = None
    last_step: int | None = None

    def has_rank(self, rank: int) -> bool:
        """Whether ``rank`` is wanted."""
        return self.ranks is None or rank in self.ranks

    @property
    def all_steps(self) -> bool:
        """Whether no step is left out."""
        return self.first_step is None and self.last_step is None

    def spans(self, spans: NDArray[np.void]) -> NDArray[np.void]:
        """Those of the steps wanted."""
        if self.all_steps:
            return spans
        return spans[self._within(spans["iteration"])]

    def _within(self, steps: NDArray[np.int32]) -> NDArray[np.bool_]:
        keep = np.ones(len(steps), dtype=bool)
        if self.first_step is not None:
            keep &= steps >= self.first_step
        if self.last_step is not None:
            keep &= steps <= self.last_step
        return keep


EVERYTHING = Selection()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some whole steps of one rank. Times are ns of the reference clock."""

    rank: int
    spans: NDArray[np.void]
    """``records.SPAN``; ``end`` is always a time: what never ended lasts to the last thing known."""

    unfinished: NDArray[np.bool_]
    """Per span: whether it never ended."""

    counters: NDArray[np.void]
    strings: list[str]
    groups: Mapping[int, Group]
    notes: list[dict[str, Any]]


def pieces(trace: Trace, rank: int, selection: Selection = EVERYTHING) -> Iterator[Piece]:
    """The records of ``rank`` in the order of its segments. Files that cannot be read are left out and added
    to ``trace.unreadable``."""
    carried = np.empty(0, dtype=SPAN)
    strings: list[str] = []
    groups: dict[int, Group] = {}
    readable, damaged = readable_segments(segment_paths(trace.files.rank_folder(rank)))
    trace.add_unreadable(rank, damaged_in(trace.session, readable, damaged))
    paths = [path for path, meta in readable if int(meta.get("session", 0)) == trace.session]
    for index, path in enumerate(paths):
        part = read_segments([path])
        trace.add_unreadable(rank, part.unreadable)
        # Spans that were carried along have the names of earlier segments; numbers mean the same in all.
        strings, groups = max(strings, part.strings, key=len), {**groups, **part.groups}
        spans = without_ended(np.concatenate((carried, part.spans)) if len(carried) else part.spans)
        last = index == len(paths) - 1
        # A step that goes on in the next segment, and what is still open, wait for it.
        wait = np.zeros(len(spans), dtype=bool)
        if not last and len(spans):
            wait = (spans["iteration"] == spans["iteration"].max()) | (spans["end"] == OPEN)
        carried, ready = spans[wait], spans[~wait]
        yield _piece(trace, rank, ready, replace(part, strings=strings, groups=groups), selection)


def _piece(trace: Trace, rank: int, spans: NDArray[np.void], part: Any, selection: Selection) -> Piece:
    known = _latest(spans, part.counters)
    spans = selection.spans(spans).copy()
    unfinished = spans["end"] == OPEN
    spans["end"][unfinished] = np.maximum(known, spans["begin"][unfinished])
    for name in ("begin", "end"):
        spans[name] = trace.clocks.to_reference(rank, spans[name])
    timed = spans["device_begin"] != 0
    for name in ("device_begin", "device_end"):
        spans[name][timed] = trace.clocks.to_reference(rank, spans[name][timed])
    counters = part.counters.copy()
    counters["time"] = trace.clocks.to_reference(rank, counters["time"])
    if not selection.all_steps:
        first = spans["begin"].min() if len(spans) else 1
        latest = spans["end"].max() if len(spans) else 0
        counters = counters[(counters["time"] >= first) & (counters["time"] <= latest)]
    return Piece(
        rank=rank,
        spans=spans,
        unfinished=unfinished,
        counters=counters,
        strings=part.strings,
        groups=part.groups,
        notes=part.notes,
    )


def _latest(spans: NDArray[np.void], counters: NDArray[np.void]) -> int:
    times = [0]
    if len(spans):
        times += [int(spans["end"].max()), int(spans["begin"].max())]
    if len(counters):
        times.append(int(counters["time"].max()))
    return max(times)
