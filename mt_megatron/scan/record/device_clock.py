"""A device's clock against the host's: moments of both at once, and device events placed between them.

An event that is recorded on a stream of its own has nothing to wait for: the device passes it between two
readings of the host's clock that are some microseconds apart. That needs no synchronisation, and it is
done again and again, as the two clocks drift and what an event says of a far one gets coarse (torch gives
fp32 milliseconds).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mt_megatron.backends.base import Backend, TimedEvent

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
