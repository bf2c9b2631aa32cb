"""The background thread of a recorder: takes what was queued, encodes it, appends it to the segments.

It also measures how punctually it wakes: a process that was stopped or starved wakes late. All ranks wake
at the same moments of the wall clock: what each of them loses to it, they lose together, while one after
another they would hold each other up every time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from struct import Struct
from typing import Any

from mt_megatron.backends.threads import RankThread
from mt_megatron.scan.format.names import Names
from mt_megatron.scan.format.records import COUNTER, FLUSH_SECONDS, PING
from mt_megatron.scan.format.segment_retention import SegmentRing, time_pair

from .encoder import Event, SpanEncoder, thread_names
from .host_counters import HostFacts
from .queues import Queues, take

logger = logging.getLogger("mt_megatron")

BEAT_SECONDS = 0.3

_BEAT_NS = round(BEAT_SECONDS * 1e9)
_FLUSH_NS = round(FLUSH_SECONDS * 1e9)
_LOOK_FLUSHES = 2
_TIME_PAIR_FLUSHES = 100
# The training thread wants the interpreter's lock after every call into torch. Whoever computes in Python
# beside it gives the lock back after this many events, for this long (a sleep of 0 would take it again).
_EVENTS_AT_ONCE = 256
_REST_SECONDS = 0.0005
_MOST_RESTS = 200
_RECENT = 64

_COUNTER = Struct("<qdHHI").pack
_PING = Struct("<4qiI").pack
assert len(_COUNTER(0, 0, 0, 0, 0)) == COUNTER.itemsize
assert len(_PING(0, 0, 0, 0, 0, 0)) == PING.itemsize


class Writer(RankThread):
    """Runs until ``stop``; whatever fails ends it and is told to ``failed`` once."""

    def __init__(
        self,
        queues: Queues,
        names: Names,
        ring: SegmentRing,
        facts: HostFacts,
        *,
        look: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """``look``, called about once a second, sees whether something else is wanted."""
        super().__init__(target=self._guarded, name="scan-writer", daemon=True)
        self.encoder = SpanEncoder(names)
        self._queues = queues
        self._names = names
        self._ring = ring
        self._facts = facts
        self._look = look
        self._failed = failed
        self._stopped = False
        self._latest_ns = 0
        self._dropped: dict[str, int] = {}
        self._unreadable = 0

    def stop(self, timeout: float) -> bool:
        """Write what is left and end; False when the disk kept it from ending within ``timeout`` seconds."""
        self._stopped = True
        if self.is_alive():
            self.join(timeout)
        return not self.is_alive()

    def _guarded(self) -> None:
        """Beat, flush, look."""
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 - tracing never ends training
            self._failed(error)
        finally:
            self._ring.close()
            self._facts.release()

    def _write(self) -> None:
        flushes, latest = 0, time.time_ns() // _FLUSH_NS
        while not self._stopped:
            number, planned, woke = self.rest()
            self._beat(planned, woke)
            # By the clock: were beats counted, late ones would put off what a killed rank does not lose.
            if number * _BEAT_NS // _FLUSH_NS == latest:
                continue
            flushes, latest = flushes + 1, number * _BEAT_NS // _FLUSH_NS
            # Everything at the same beats: with what was used last long gone from the caches, a wake-up costs
            # more than what is done in it.
            self.flush()
            if flushes % _LOOK_FLUSHES == 0:
                self._look()
            if flushes % _TIME_PAIR_FLUSHES == 0:
                self._queues.notes.append({"what": "time", **time_pair()})
        self.flush(last=True)

    def rest(self) -> tuple[int, int, int]:
        """Sleep until the next beat; returns its number, which is that of all ranks, and when the sleep
        should have ended and when it did (ns)."""
        now = time.time_ns()
        ahead = _BEAT_NS - now % _BEAT_NS
        if ahead < _BEAT_NS // 2:
            # This one is late, or the wall clock was put right.
            ahead += _BEAT_NS
        planned = time.perf_counter_ns() + ahead
        time.sleep(ahead / 1e9)
        return (now + ahead) // _BEAT_NS, planned, time.perf_counter_ns()

    def _beat(self, planned: int, woke: int) -> None:
        self._latest_ns = max(self._latest_ns, woke - planned)
        pause = self._facts.pause(planned, woke)
        if pause is not None:
            # It began before the thread was to wake, and after whatever else was heard last.
            recent = (_moment_of(event) for event in reversed(self._queues.events[-_RECENT:]))
            began = max(planned - _BEAT_NS, next((each for each in recent if each < planned), planned))
            self.encoder.pause(pause, began, woke, threading.get_ident())

    def flush(self, *, last: bool = False) -> None:
        """Encode and append everything queued so far."""
        queues, encoder = self._queues, self.encoder
        # Before the tables are written: these hold numbers of names that are in the tables by now.
        arrays = take(queues.spans)
        for name, begin, end, ident in self._facts.gc_pauses():
            encoder.pause(name, begin, end, ident)
        events = take(queues.events)
        queues.taken += len(events)
        at_once = max(_EVENTS_AT_ONCE, len(events) // _MOST_RESTS)
        # Also of none: what began earlier may have ended.
        for start in range(0, max(len(events), 1), at_once):
            if start and not last:
                time.sleep(_REST_SECONDS)
            encoder.feed(events[start : start + at_once])
        encoder.open_spans(time.perf_counter_ns(), **({"at_least": 0} if last else {}))
        spans, encoder.out = encoder.out, bytearray()
        for array in arrays:
            spans += array
        counters = self._counters()
        pings = b"".join(_PING(*ping, 0) for ping in take(queues.pings))
        notes = (*take(queues.notes), *self._complaints())
        self._ring.write(
            spans=spans,
            counters=counters,
            pings=pings,
            notes=notes,
            threads=lambda: thread_names(encoder.threads),
        )

    def _counters(self) -> bytes:
        now, string = time.perf_counter_ns(), self._names.string
        late = self._latest_ns
        self._latest_ns = 0
        values = [("beat_delay_ns", late if late >= 1_000_000 else 0), *self._facts.sample()]
        rows = [_COUNTER(now, value, string(name), 0, 0) for name, value in values]
        rows += [
            _COUNTER(when, value, name, device, 0)
            for when, value, name, device in take(self._queues.counters)
        ]
        return b"".join(rows)

    def _complaints(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        of = dict(self._queues.dropped)
        if of != self._dropped:
            self._dropped = of
            total, why = sum(of.values()), "disk too slow"
            found.append(
                {"what": "dropped", "time": time.perf_counter_ns(), "events": total, "of": of, "why": why}
            )
            said = ", ".join(f"{count} {name}" for name, count in of.items())
            logger.warning("tracing has dropped %s so far: the disk is too slow", said)
        if self.encoder.unreadable > self._unreadable:
            self._unreadable = self.encoder.unreadable
            why = "attributes that no record can hold"
            found.append(
                {"what": "dropped", "time": time.perf_counter_ns(), "events": self._unreadable, "why": why}
            )
        return found


def _moment_of(event: Event) -> int:
    """When it was heard (ns); of a span that has ended, its end."""
    return event[0] if isinstance(event, tuple) else event.ended or event.begun
