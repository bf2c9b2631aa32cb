"""A growing trace read bit by bit: what each rank appended since the last look."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ScanError
from mt_megatron.scan.clock.fit import Clocks
from mt_megatron.scan.diagnose.rank_ends import Key, Pace, RankEnd, rank_end
from mt_megatron.scan.format.recording_end import Ended, read_ended
from mt_megatron.scan.format.records import COUNTER, FLUSH_SECONDS, KIND, OPEN, PING, SPAN
from mt_megatron.scan.format.run_files import segment_paths
from mt_megatron.scan.format.segments import (
    COUNTER_VALUES,
    GROUPS,
    NOTE,
    PINGS,
    SPANS,
    STRINGS,
    Group,
    RankTrace,
    read_blocks,
    without_ended,
)

MOST_BYTES = 64 << 20
"""Records of one rank that are held, unless its reader says otherwise."""

_QUIET_S = 1.0
_MOST_NOTES = 64
_HELD_NS = round(2e9 * FLUSH_SECONDS)


class RankTail:
    """One rank's files. ``poll`` takes in what is new; ``part`` hands out whole steps."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.meta: dict[str, Any] = {}
        self.session = -1
        self.fresh = time.monotonic()
        """When something new was last seen, by this process's clock."""

        self.moved = self.fresh
        """When a span was, which a rank that stands still writes none of."""

        self.ended: Ended | None = None
        """How its recording ended, as soon as that is known."""

        self.most_bytes = MOST_BYTES
        """Records that are held at most; of what nobody takes the oldest steps are given up."""

        self.given_up = 0
        """Records that were."""

        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._ignored: set[Path] = set()
        self._reset()

    def _reset(self) -> None:
        self._strings: list[str] = []
        self._tables: dict[Path, list[str]] = {}
        self._groups: dict[int, Group] = {}
        self._spans: NDArray[np.void] = np.empty(0, dtype=SPAN)
        self._counters: NDArray[np.void] = np.empty(0, dtype=COUNTER)
        self.pings: NDArray[np.void] = np.empty(0, dtype=PING)
        self._notes: dict[str, dict[str, Any]] = {}
        self._reached: dict[Key, int] = {}
        self._last_seen = 0
        self._given_up_until = 0
        self._pace = Pace()
        self.ended = None

    def poll(self) -> None:
        """Read what was appended. A newer session than the one followed so far replaces it."""
        new: dict[int, list[Any]] = {SPANS: [], COUNTER_VALUES: [], PINGS: []}
        for path in segment_paths(self._folder):
            if path in self._ignored:
                continue
            try:
                for kind, payload, offset in read_blocks(path, self._offsets.get(path, 0)):
                    self._offsets[path] = offset
                    self.fresh = time.monotonic()
                    if not self._take(path, kind, payload, new):
                        break
            except (OSError, ScanError):
                # Gone, damaged, or not to be read just now: the others are followed, this one is tried again.
                continue
        self._keep(new)
        # One small file, and only of those that write nothing: they may never write again.
        if self.ended is None and self.session >= 0 and time.monotonic() - self.fresh > _QUIET_S:
            self.ended = read_ended(self._folder, self.session)
            if self.ended is not None:
                self._note(self.ended.note())

    def _take(self, path: Path, kind: int, payload: Any, new: dict[int, list[Any]]) -> bool:
        if kind == NOTE and payload.get("what") == "meta":
            session = int(payload.get("session", 0))
            if session < self.session:
                self._ignored.add(path)
                return False
            if session > self.session:
                self._reset()
                for rows in new.values():
                    rows.clear()
                self.session, self.meta = session, payload
            return True
        if kind == STRINGS:
            table = self._tables.setdefault(path, [])
            table.extend(payload)
            self._strings = max(self._strings, table, key=len)
        elif kind == GROUPS:
            for row in payload:
                self._groups[int(row["id"])] = Group(name=row["name"], ranks=tuple(row["ranks"]))
        elif kind == NOTE:
            self._note(payload)
        elif kind in new:
            new[kind].append(payload)
        return True

    def _note(self, facts: dict[str, Any]) -> None:
        """Keep the last note of each kind: many of one kind must not push out the stacks of a hang."""
        what = str(facts.get("what"))
        self._notes.pop(what, None)
        self._notes[what] = facts
        if len(self._notes) > _MOST_NOTES:
            del self._notes[next(iter(self._notes))]

    def _keep(self, new: Mapping[int, list[Any]]) -> None:
        if new[SPANS]:
            self.moved = self.fresh
            rows = np.concatenate(new[SPANS])
            entered = rank_end(self.rank, self._trace(rows, self._counters[:0]), _as_it_is)
            for key, number in entered.reached.items():
                self._reached[key] = max(self._reached.get(key, -1), number)
            self._last_seen = max(self._last_seen, entered.last_seen)
            self._pace.feed(rows)
            rows = rows[(rows["iteration"] > self._given_up_until) | (rows["iteration"] == 0)]
            self._spans = without_ended(np.concatenate([self._spans, rows]))
            self._bound()
        if new[COUNTER_VALUES]:
            most = max(1, self.most_bytes // (4 * COUNTER.itemsize))
            self._counters = np.concatenate([self._counters, *new[COUNTER_VALUES]])[-most:]
            self._last_seen = max(self._last_seen, int(self._counters["time"].max()))
        if new[PINGS]:
            most = max(1, self.most_bytes // (8 * PING.itemsize))
            self.pings = np.concatenate([self.pings, *new[PINGS]])[-most:]

    def _bound(self) -> None:
        """Give up the oldest half of what nobody takes: another rank's steps do not come, or there are no
        steps."""
        most = max(1, self.most_bytes // SPAN.itemsize)
        if len(self._spans) <= most:
            return
        # Whole steps, also what is still to come of them: half a one would look like one with less to do.
        # What has not ended still says who hangs.
        cut = len(self._spans) - most // 2
        border = int(self._spans["iteration"][:cut].max())
        keep = (self._spans["iteration"] > border) | (self._spans["end"] == OPEN)
        if border == 0:
            keep[cut:] = True
        self._given_up_until = border
        self.given_up += int((~keep).sum())
        self._spans = self._spans[keep]

    @property
    def step(self) -> int:
        """The last step of which something is in hand; 0 when nothing is."""
        return int(self._spans["iteration"].max(initial=0))

    @property
    def steps_done(self) -> NDArray[np.int64]:
        """Iterations of the steps in hand that have ended, ascending."""
        rows = (self._spans["kind"] == KIND["step"]) & (self._spans["end"] != OPEN)
        found: NDArray[np.int64] = np.unique(self._spans["iteration"][rows]).astype(np.int64)
        return found

    @property
    def steps_whole(self) -> NDArray[np.int64]:
        """Of ``steps_done`` those of which nothing more is to come while the rank goes on recording."""
        # The last one is whole only when the next has begun: a checkpoint may follow it.
        found = self.steps_done[:-1]
        if self.meta.get("device_type", "cpu") == "cpu":
            return found
        # The recorder holds spans of a device's work until it knows their times: they are written after their
        # step's span, two flushes after its end at the latest.
        rows = (self._spans["kind"] == KIND["step"]) & (self._spans["end"] != OPEN)
        rows &= self._spans["end"] <= self._last_seen - _HELD_NS
        return found[np.isin(found, self._spans["iteration"][rows])]

    def part(self, last_step: int) -> RankTrace:
        """The records up to the end of ``last_step`` and the step after it, which the caller cuts off;
        what belongs to steps up to ``last_step`` is no longer kept."""
        steps = self._spans[(self._spans["kind"] == KIND["step"]) & (self._spans["end"] != OPEN)]
        later = steps[steps["iteration"] > last_step]
        border = int(later["begin"].min()) if len(later) else int(np.iinfo(np.int64).max)
        still = self._spans["end"] == OPEN
        before = (self._spans["begin"] < border) & ~still
        next_step = (self._spans["kind"] == KIND["step"]) & (self._spans["begin"] == border)
        found = self._trace(self._spans[before | next_step], self._counters)
        self._spans = self._spans[~before]
        # The last value before the border is where the next part's counters begin.
        earlier = np.flatnonzero(self._counters["time"] < border - 2_000_000_000)
        if len(earlier):
            self._counters = self._counters[int(earlier[-1]) :]
        return found

    def end(self, clocks: Clocks) -> RankEnd:
        """Where it stands now, on the common clock."""

        def to_reference(times: Any) -> Any:
            return clocks.to_reference(self.rank, times)

        found = rank_end(self.rank, self._trace(self._spans, self._counters), to_reference)
        last = to_reference(np.array([self._last_seen], dtype=np.int64))
        return replace(
            found,
            reached=self._reached,
            last_seen=max(found.last_seen, int(np.asarray(last)[0])),
            usual_gap=self._pace.usual_ns,
        )

    @property
    def waits(self) -> bool:
        """Whether it is in a communication that has not ended."""
        still = self._spans["kind"][self._spans["end"] == OPEN]
        return bool(np.isin(still, [KIND["collective"], KIND["p2p"]]).any())

    @property
    def trace(self) -> RankTrace:
        """What is in hand."""
        return self._trace(self._spans, self._counters)

    def _trace(self, spans: NDArray[np.void], counters: NDArray[np.void]) -> RankTrace:
        return RankTrace(
            meta=self.meta,
            strings=self._strings,
            groups=self._groups,
            spans=spans,
            counters=counters,
            pings=self.pings,
            notes=list(self._notes.values()),
        )


def _as_it_is(times: NDArray[np.int64]) -> NDArray[np.int64]:
    return times
