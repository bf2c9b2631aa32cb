"""Spans of scan's trace by step, on the reference clock, out of a bounded cache of segments."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mt_megatron.host.bounds import Recent
from mt_megatron.scan.format.records import KIND, OPEN, SPAN
from mt_megatron.scan.format.run_files import segment_paths
from mt_megatron.scan.format.segments import RankTrace, read_segments, segment_meta, without_ended

if TYPE_CHECKING:
    from mt_megatron.scan.analysis.trace import Trace

CACHE_BYTES = 96 * 2**20
"""Decoded segments that are kept."""

FRESH_S = 2.0
"""Clocks and the list of ranks are read again after so long."""

MOST_SEGMENTS = 8
"""Of a rank, newest first, in which steps are looked for."""


class TimelineReader:
    """Reads what is asked for of a trace that may grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: Recent[Hashable, RankTrace] = Recent(CACHE_BYTES)
        self._trace: tuple[Path, float, Trace] | None = None

    def trace(self, run: Path) -> Trace:
        """The newest session, clocks fitted. Raises ``ScanError`` where there is none."""
        with self._lock:
            # Not earlier: the fit of clocks takes longer to import than the rest of the page's server.
            from mt_megatron.scan.analysis.trace import open_trace

            known = self._trace
            if known is not None and known[0] == run and time.monotonic() - known[1] < FRESH_S:
                return known[2]
            found = open_trace(run)
            self._trace = (run, time.monotonic(), found)
            return found

    def parts(self, trace: Trace, rank: int, first_step: int) -> Iterator[RankTrace]:
        """The rank's segments that may hold steps from ``first_step`` on, newest first."""
        paths = segment_paths(trace.files.rank_folder(rank))[::-1]
        for path in paths[:MOST_SEGMENTS]:
            part = self._segment(path, trace.session)
            if part is None:
                continue
            yield part
            steps = part.spans["iteration"]
            if len(steps) and int(steps[steps > 0].min(initial=np.iinfo(np.int32).max)) < first_step:
                return

    def _segment(self, path: Path, session: int) -> RankTrace | None:
        try:
            key = (path, path.stat().st_size)
            with self._lock:
                found = self._segments.get(key)
            if found is None:
                meta = segment_meta(path)
                if not meta or int(meta.get("session", 0)) != session:
                    return None
                found = read_segments([path])
                with self._lock:
                    weight = found.spans.nbytes + found.counters.nbytes + 4_096
                    self._segments.put(key, found, weight)
            return found
        except FileNotFoundError:
            return None  # rotated away meanwhile

    def steps(self, trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Numbers, begins and ends (ns of the reference clock) of the steps of the first rank that has some,
        as far as ``MOST_SEGMENTS`` reach."""
        for rank in trace.ranks:
            found = []
            for part in self.parts(trace, rank, 0):
                spans = part.spans
                found.append(spans[(spans["kind"] == KIND["step"]) & (spans["end"] != OPEN)])
            rows = np.concatenate([np.empty(0, SPAN), *found])
            if len(rows):
                rows = without_ended(rows)
                order = np.argsort(rows["begin"], kind="stable")
                rows = rows[order]
                return (
                    rows["iteration"].astype(np.int64),
                    np.asarray(trace.clocks.to_reference(rank, rows["begin"]), np.int64),
                    np.asarray(trace.clocks.to_reference(rank, rows["end"]), np.int64),
                )
        empty = np.empty(0, np.int64)
        return empty, empty, empty
