"""A tracing session that can be held still between two blocks of steps, and goes on as if no time had passed.

While it is held nobody listens, no hook is on a module, garbage collections are not heard of, and the
background thread waits for one condition: a step then costs what it costs with ``--scan off``. Beginning and
ending a whole session for every block would take longer than the block.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, get_args

from mt_megatron.scan.record.levels import Level
from mt_megatron.scan.record.writer import BEAT_SECONDS
from mt_megatron.scan.session import Session
from mt_megatron.seams import events

_BEAT_NS = round(BEAT_SECONDS * 1e9)


class TracedTime:
    """A clock that runs while it is open; the background thread sleeps by it.

    It is set at each opening, to a time that all ranks agree on: their background threads beat together, as
    they do by the wall clock.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = False
        self._began = self._at = 0

    def open(self, at: int | None = None) -> None:
        """It is ``at`` (ns) now (None: what it was), and goes on."""
        with self._changed:
            self._open, self._began = True, time.perf_counter_ns()
            self._at = self._at if at is None else at
            self._changed.notify_all()

    def close(self) -> None:
        """Stand still."""
        with self._changed:
            self._at, self._open = self._now(), False
            self._changed.notify_all()

    def rest(self) -> tuple[int, int, int]:
        """``Writer.rest`` by this clock."""
        with self._changed:
            due = (self._now() + _BEAT_NS // 2) // _BEAT_NS * _BEAT_NS + _BEAT_NS
            while True:
                left = due - self._now()
                if not self._open:
                    self._changed.wait()
                elif left > 0:
                    self._changed.wait(left / 1e9)
                else:
                    woke = time.perf_counter_ns()
                    return due // _BEAT_NS, woke + left, woke

    def _now(self) -> int:
        return self._at + (time.perf_counter_ns() - self._began if self._open else 0)


class HeldSession:
    """A session of this rank that records only between ``release`` and ``hold``."""

    def __init__(self, folder: Path, ours: Any) -> None:
        """``ours``: a ``throughput_sides.Ours``. Collective."""
        self._time = TracedTime()
        self._session = Session(
            folder,
            rank=ours.job.rank,
            layout=ours.job.layout,
            backend=ours.job.backend,
            level="base",
            modules=ours.trainable.chunks,
        )
        self._session.start()
        recorder = self._session.recorder
        assert recorder is not None and recorder.failed is None, "the recorder failed"
        self._recorder: Any = recorder
        self._writer = recorder._writer
        assert self._writer is not None
        # No note of the level at every block: a training changes it hardly ever.
        recorder._listening._changed = self._follow
        # What it is in at this moment it sleeps to the end.
        self._writer.rest = self._time.rest  # type: ignore[method-assign]
        time.sleep(2 * BEAT_SECONDS)
        self.hold()

    def release(self, level: Level, at: int) -> None:
        """Record at ``level``; the background's clock says ``at`` (ns)."""
        self._recorder._facts._collector.start()
        self._recorder.set_level(level)
        self._recorder._listening.start()
        # A training works these out once; here every block would.
        for name in get_args(events.EventName):
            events._about(name)
        self._time.open(at)

    def hold(self) -> None:
        """Hold everything still."""
        self._recorder._listening.stop()
        self._recorder._facts._collector.close()
        self._time.close()
        assert self._recorder.failed is None, f"the recorder failed: {self._recorder.failed}"
        assert not events.listening(), "somebody listens although nothing is traced"

    def _follow(self, old: Level, new: Level) -> None:
        for callback in self._recorder._level_callbacks:
            callback(old, new)

    def background_ns(self) -> int:
        """Processor time of all threads of the tracing so far."""
        return sum(
            int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
            for thread in threading.enumerate()
            if thread.name.startswith("scan-")
        )

    def close(self) -> None:
        """End it for good."""
        self._time.open()
        self._session.close()
