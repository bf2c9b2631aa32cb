"""A sink in a thread of its own: alerts and the page never wait for its server."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from .base import Sink, SinkError, make

MOST_NUMBERS = 200_000
"""Numbers that wait for a sink, some 30 MiB; what comes then is left out and counted."""

CLOSE_SECONDS = 12.0
"""Longest wait at the end, for what is left and for the sink to finish."""


class QueuedSink:
    """Takes records at once and hands them on as the sink takes them."""

    def __init__(self, title: str, open_sink: Callable[[], Sink], say: Callable[[str], None]) -> None:
        """``open_sink`` is called in the thread, and may raise ``SinkError``; ``say`` gets a line where
        something is left out."""
        self.title = title
        self.left_out = 0
        """Records that found no room."""

        self._open_sink = open_sink
        self._say = say
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque()
        self._numbers = self._unfinished = 0
        """Of what waits, and records that the sink has not taken."""

        self._changed = threading.Condition()
        self._until: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"scope-sink-{title}", daemon=True)
        self._thread.start()

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue the numbers of ``step``."""
        with self._changed:
            room = self._numbers < MOST_NUMBERS
            if room and self._thread.is_alive():
                self._waiting.append((step, dict(numbers)))
                self._numbers += len(numbers)
                self._unfinished += 1
                self._changed.notify()
            elif not room:
                self.left_out += 1
        if not room and self.left_out == 1:
            self._say(f"scope: {self.title} does not keep up: numbers from step {step} on are left out of it")

    def begin_to_close(self) -> None:
        """Hand on what waits, and finish; without waiting for it."""
        with self._changed:
            self._until = self._until or time.monotonic() + CLOSE_SECONDS
            self._changed.notify()

    def close(self) -> None:
        """Wait for the end, until ``CLOSE_SECONDS`` after ``begin_to_close``."""
        self.begin_to_close()
        assert self._until is not None
        self._thread.join(max(0.0, self._until - time.monotonic()))
        if self.left_out:
            self._say(f"scope: {self.title} lacks {self.left_out:,} records that it could not take in time")
        if self._thread.is_alive():
            self._say(f"scope: {self.title} does not answer: it lacks the last {self._unfinished:,} records")

    def _run(self) -> None:
        try:
            sink = self._open_sink()
        except SinkError as error:
            self._say(f"scope: nothing goes to {self.title}: {error}")
            return
        try:
            while (found := self._next()) is not None:
                sink.record(*found)
                with self._changed:
                    self._unfinished -= 1
            sink.close()
        except Exception as error:  # noqa: BLE001 - a foreign package: its troubles end it alone
            self._say(f"scope: nothing more goes to {self.title} ({type(error).__name__}: {error})")

    def _next(self) -> tuple[int, Mapping[str, float]] | None:
        """The next record; None at the end."""
        with self._changed:
            while not self._waiting and self._until is None:
                self._changed.wait()
            if not self._waiting:
                return None
            found = self._waiting.popleft()
            self._numbers -= len(found[1])
            return found


def queued(texts: Sequence[str], run: Path, say: Callable[[str], None]) -> list[Sink]:
    """Sinks of ``texts`` (``FORM``), each in a thread of its own."""
    return [QueuedSink(text, partial(make, text, run), say) for text in texts]
