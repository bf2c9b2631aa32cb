"""How long this process was inside collectives and transfers between pipeline stages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mt_megatron.seams import events

_COUNTED: frozenset[events.EventName] = frozenset({"collective", "p2p"})


class CommunicationClock:
    """Seconds within ``collective`` and ``p2p`` events of ``mt_megatron.seams.events``.

    Time within nested events counts once. For an operation that was only started it is the time to
    start it and the time of the wait that ends it, not what ran in the background meanwhile. Waiting
    for a slower process counts as communication. Host time: on a device that queues its
    collectives the host is elsewhere by the time they run, so there it says nothing.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._local = threading.local()
        self._threads: list[_Thread] = []
        self._stop = events.subscribe(self._hear, _COUNTED)

    def seconds(self) -> float:
        """Seconds so far, over all threads; one that is still inside an event counts when it leaves."""
        return sum(thread.seconds for thread in self._threads)

    def close(self) -> None:
        """Listen no longer."""
        self._stop()

    def _hear(self, phase: events.Phase, name: events.EventName, attrs: Mapping[str, Any]) -> None:
        thread: _Thread | None = getattr(self._local, "thread", None)
        if thread is None:
            thread = self._local.thread = _Thread()
            self._threads.append(thread)
        if phase == "begin":
            if thread.depth == 0:
                thread.began = self._now()
            thread.depth += 1
        elif thread.depth:
            # An end without its begin is of an event that was open when listening started.
            thread.depth -= 1
            if thread.depth == 0:
                thread.seconds += self._now() - thread.began


class _Thread:
    """What one thread has spent; nobody else writes to it."""

    __slots__ = ("began", "depth", "seconds")

    def __init__(self) -> None:
        self.began = 0.0
        self.depth = 0
        self.seconds = 0.0
