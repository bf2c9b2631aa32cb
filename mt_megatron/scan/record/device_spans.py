"""When the device did what the host only asked for: events of the backend around it, read back later.

The training thread records an event where an operation begins and where it ends, and waits for neither.
The recorder's span of the operation is held back until the device has passed both, gets their times on
the host's clock, and is written then. One that the device has not passed for a while is written as open:
on a device that hangs, the operations behind the fault are in the trace as what they are, begun.

``DeviceClock``: an event that is recorded on a stream of its own has nothing to wait for: the device passes
it between two readings of the host's clock that are some microseconds apart. That needs no synchronisation,
and it is done again and again, as the two clocks drift and what an event says of a far one gets coarse (torch
gives fp32 milliseconds).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.backends.base import Backend, TimedEvent
from mt_megatron.backends.threads import RankThread
from mt_megatron.scan.format.records import FLUSH_SECONDS, OPEN, SPAN
from mt_megatron.seams import events

from .levels import Level

logger = logging.getLogger("mt_megatron")

TIMED: Mapping[Level, frozenset[events.EventName]] = {
    "off": frozenset(),
    "base": frozenset({"collective", "p2p", "forward", "backward", "optimizer"}),
    "full": frozenset({"collective", "p2p", "forward", "backward", "optimizer", "layer", "module"}),
    # The profiler times the rest.
    "kernel": frozenset({"collective", "p2p", "forward", "backward", "optimizer", "layer", "module"}),
}
"""Events whose device time is taken, by level."""

_POLL_SECONDS = 0.1
_ANCHOR_SECONDS = 1.0
_OPEN_AFTER_NS = 500_000_000
_MOST_HELD = 100_000
_LOOK_AHEAD = 64


class Timing:
    """The two events around one operation; the ``device`` attribute of its event."""

    __slots__ = ("first", "last", "owner")

    def __init__(self, owner: DeviceTime, first: TimedEvent) -> None:
        self.owner = owner
        self.first = first
        self.last: TimedEvent | None = None

    def hold(self, record: bytes) -> bool:
        """Write ``record``, one packed span, once the device has been there; any thread. False: not
        taken, as nobody waits for the device any more."""
        return self.owner.hold(self, record)


class _Held:
    __slots__ = ("is_open", "record", "since", "timing")

    def __init__(self, timing: Timing, record: bytes) -> None:
        self.timing = timing
        self.record = record
        self.since = time.perf_counter_ns()
        self.is_open = False


class DeviceTime:
    """Device times of one rank's spans. ``start``, ``set_level``, ``stop`` belong to the training thread."""

    def __init__(
        self,
        backend: Backend,
        deliver: Callable[[NDArray[np.void]], None],
        note: Callable[..., None],
    ) -> None:
        """``deliver`` takes spans that are ready, ``note`` a line about the clocks now and then."""
        self._held: deque[_Held] = deque()
        self.failed: str | None = None
        self._backend = backend
        self._deliver = deliver
        self._note = note
        self._clock = DeviceClock(backend)
        self._timed: frozenset[events.EventName] = frozenset()
        self._local = threading.local()
        self._early_ns = 0
        self._stop_hearing: Callable[[], None] | None = None
        self._ending = threading.Event()
        self._thread: RankThread | None = None

    def start(self, level: Level) -> None:
        """Time what ``level`` asks for from now on. Nothing happens where the host does the work."""
        if self._backend.timed_event() is None:
            return
        self._thread = RankThread(target=self._run, name="scan-device-time", daemon=True)
        self._thread.start()
        self.set_level(level)

    def set_level(self, level: Level) -> None:
        """Time what ``level`` asks for; between two steps."""
        self._timed = TIMED[level] if self._thread is not None and self.failed is None else frozenset()
        if self._stop_hearing is not None:
            self._stop_hearing()
            self._stop_hearing = None
        if self._timed:
            self._stop_hearing = events.subscribe(self._hear, self._timed)

    def stop(self, patience: float = 2.0) -> None:
        """Time nothing more, and write what is held; what the device has not passed by then as open."""
        self.set_level("off")
        if self._thread is None:
            return
        if self.failed is None:
            # What was heard last is encoded by then.
            time.sleep(2 * FLUSH_SECONDS)
        self._ending.set()
        self._thread.join(patience)
        self._thread = None

    def hold(self, timing: Timing, record: bytes) -> bool:
        """See ``Timing.hold``."""
        if self._ending.is_set() or self.failed is not None:
            return False
        self._held.append(_Held(timing, record))
        return True

    def _hear(self, phase: events.Phase, name: events.EventName, attrs: Mapping[str, Any]) -> None:
        if name not in self._timed:
            return
        try:
            stack: list[tuple[str, Timing]] | None = getattr(self._local, "stack", None)
            if stack is None:
                stack = self._local.stack = []
            if phase == "begin":
                if len(self._held) < _MOST_HELD and isinstance(attrs, dict):
                    timing = Timing(self, self._record())
                    # Whoever keeps the attributes finds it there; each event has a dict of its own.
                    attrs["device"] = timing
                    stack.append((name, timing))
            else:
                for index in range(len(stack) - 1, -1, -1):
                    if stack[index][0] == name:
                        # Ends that never came, of operations that failed.
                        timing = stack[index][1]
                        del stack[index:]
                        timing.last = self._record()
                        break
        except Exception as error:  # noqa: BLE001 - what is raised here, the step would raise
            self._fail(error)

    def _record(self) -> TimedEvent:
        event = self._backend.timed_event()
        assert event is not None
        event.record()
        return event

    def _run(self) -> None:
        try:
            due = 0.0
            while not self._ending.wait(_POLL_SECONDS):
                if time.monotonic() >= due and (self._held or due == 0.0):
                    self._compare()
                    due = time.monotonic() + _ANCHOR_SECONDS
                self.settle()
            self._compare()
            self.settle(at_end=True)
        except Exception as error:  # noqa: BLE001 - tracing never ends training
            self._fail(error)

    def _compare(self) -> None:
        anchor = self._clock.anchor()
        if anchor is not None:
            self._note(
                what="device_clock",
                uncertainty_ns=anchor.uncertainty_ns,
                drift_ppm=self._clock.drift_ppm,
                early_ns=self._early_ns,
            )

    def settle(self, *, at_end: bool = False) -> None:
        """Write what the device has passed; ``at_end`` also what it has not, as open."""
        if self._clock.last is None and not at_end:
            return
        ready, waiting, now = [], [], time.perf_counter_ns()
        for _ in range(len(self._held)):
            each = self._held.popleft()
            if self._clock.last is not None and _passed(each.timing):
                ready.append(self._placed(each.timing, each.record))
                continue
            waiting.append(each)
            if (at_end or now - each.since > _OPEN_AFTER_NS) and not each.is_open:
                each.is_open = True
                ready.append(_open(each.record))
            # Streams are passed in order: behind many that wait hardly one is ready.
            if len(waiting) >= _LOOK_AHEAD and not at_end:
                break
        if not at_end:
            self._held.extendleft(reversed(waiting))
        if ready:
            self._deliver(np.frombuffer(b"".join(ready), dtype=SPAN))

    def _placed(self, timing: Timing, record: bytes) -> bytes:
        assert timing.last is not None
        span = np.frombuffer(bytearray(record), dtype=SPAN)
        begin = self._clock.host_ns(timing.first)
        lasted = round(timing.first.elapsed_time(timing.last) * 1e6)
        # Before it was asked for nothing began: what there is of that is the error of the comparison.
        self._early_ns = max(self._early_ns, int(span["begin"][0]) - begin)
        span["device_begin"], span["device_end"] = begin, begin + max(lasted, 0)
        return span.tobytes()

    def _fail(self, error: BaseException) -> None:
        if self.failed is None:
            self.failed = f"{type(error).__name__}: {error}"
            self._timed = frozenset()
            logger.warning(
                "device times are no longer taken on this rank, host times still are: %s", self.failed
            )
            # Another thread may take the last one at the same time.
            with contextlib.suppress(IndexError):
                while True:
                    self._deliver(np.frombuffer(self._held.popleft().record, dtype=SPAN))


def _passed(timing: Timing) -> bool:
    return timing.last is not None and timing.last.query() and timing.first.query()


def _open(record: bytes) -> bytes:
    span = np.frombuffer(bytearray(record), dtype=SPAN)
    span["end"] = OPEN
    return span.tobytes()


_TRIES = 5
_PATIENCE_NS = 5_000_000
_KEPT = 128


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A moment that both clocks have seen."""

    event: TimedEvent
    host_ns: int
    """The host's clock at the event, give or take ``uncertainty_ns``."""

    uncertainty_ns: int


class DeviceClock:
    """Moments of the current device on the host's clock. ``anchor`` and ``host_ns`` belong to one thread."""

    def __init__(self, backend: Backend, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._backend = backend
        self._now = now
        self._stream: Any = backend.new_stream()
        self._anchors: deque[Anchor] = deque(maxlen=_KEPT)
        self.drift_ppm: float | None = None
        """How much faster the device's clock ran than the host's between the last two anchors."""

    @property
    def last(self) -> Anchor | None:
        """The newest anchor."""
        return self._anchors[-1] if self._anchors else None

    def anchor(self) -> Anchor | None:
        """Compare the clocks now: the best of a few tries. None when the device did not get to an event
        within milliseconds."""
        best: Anchor | None = None
        for _ in range(_TRIES):
            event = self._backend.timed_event()
            if event is None:
                return None
            before = self._now()
            event.record(self._stream)
            while not event.query():
                if self._now() - before > _PATIENCE_NS:
                    return best if best is None else self._keep(best)
            half = (self._now() - before + 1) // 2
            if best is None or half < best.uncertainty_ns:
                best = Anchor(event=event, host_ns=before + half, uncertainty_ns=half)
        return None if best is None else self._keep(best)

    def host_ns(self, event: TimedEvent) -> int:
        """When the device got to ``event``, on the host's clock; it must have. Raises ``LookupError``
        without an anchor."""
        if not self._anchors:
            raise LookupError("no anchor")
        newest = self._anchors[-1]
        at = _from(newest, event)
        nearest = min(self._anchors, key=lambda each: abs(each.host_ns - at))
        return at if nearest is newest else _from(nearest, event)

    def _keep(self, found: Anchor) -> Anchor:
        last = self.last
        if last is not None and found.host_ns > last.host_ns:
            passed = found.host_ns - last.host_ns
            self.drift_ppm = (last.event.elapsed_time(found.event) * 1e6 - passed) / passed * 1e6
        self._anchors.append(found)
        return found


def _from(anchor: Anchor, event: TimedEvent) -> int:
    return anchor.host_ns + round(anchor.event.elapsed_time(event) * 1e6)
