"""Records what this process does: hears ``seams.events``, queues them, and a background thread writes them.

    recorder = Recorder("run", rank=0, level="base")
    recorder.start()
    ...                      # train
    recorder.close()

What a training thread does per event is to append one object to a list. It makes no collective, no system
call, no lock. Whatever fails in here is said once and switches the tracing off; training goes on.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.backends.threads import RankThread
from mt_megatron.errors import ScanError
from mt_megatron.scan.format.names import Names
from mt_megatron.scan.format.recording_end import Ending
from mt_megatron.scan.format.records import SPAN
from mt_megatron.scan.format.run_files import run_files
from mt_megatron.scan.format.segment_retention import MOST_BYTES, SegmentRing

from .control import ControlWatch
from .event_listener import LevelCallback, Listening
from .host_counters import HostFacts, Telemetry
from .levels import Level, Window, level_of
from .queues import Queues
from .writer import Writer

logger = logging.getLogger("mt_megatron")

_CLOSE_SECONDS = 5.0


class Recorder:
    """The trace of one rank. Made and started once; ``start`` and ``close`` belong to the training thread."""

    def __init__(
        self,
        run_folder: Path | str,
        *,
        rank: int,
        level: Level = "base",
        window: Window | None = None,
        meta: Mapping[str, Any] | None = None,
        telemetry: Telemetry | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Nothing happens before ``start``.

        ``meta`` goes into the first note of each segment (``dp``, ``pp``, ``tp``, ``node``, ``device_type``;
        ``session`` where the ranks have agreed on one). ``telemetry`` returns a device's
        ``backends.telemetry.readings.Reading``. ``most_bytes`` bounds what this rank keeps on disk.
        """
        self.files = run_files(run_folder)
        self.rank = rank
        self.failed: str | None = None
        """Why the tracing ended before its time."""
        self._meta = dict(meta or {})
        self._most_bytes = most_bytes
        self._telemetry = telemetry
        self._names = Names()
        self._queues = Queues()
        self._listening = Listening(self._queues, level, window, changed=self._changed, failed=self._fail)
        self._level_callbacks: list[LevelCallback] = []
        self._look_callbacks: list[Callable[[], None]] = []
        self._control = ControlWatch(self.files.control, self._controlled)
        self._samples: dict[str, Callable[[], float | None]] = {}
        self._facts: HostFacts | None = None
        self._writer: Writer | None = None
        self._ending: Ending | None = None
        self._running = False

    @property
    def level(self) -> Level:
        """What is recorded now."""
        return self._listening.level

    @property
    def iteration(self) -> int:
        """The step that began last, or in a program without step events how many have ended."""
        return self._listening.iteration

    @property
    def heard(self) -> int:
        """How much was heard so far, a span counting once and all else for its begin and its end: it changes
        whenever the rank gets on."""
        return self._queues.taken + len(self._queues.events)

    def start(self) -> None:
        """Begin to listen. A folder that cannot be written is said and leaves the tracing off."""
        if self._writer is not None or self.failed:
            raise ScanError("found a recorder that was started before; expected a new one for each start")
        try:
            ring = SegmentRing(
                self.files.rank_folder(self.rank),
                self.rank,
                self._names,
                self._meta,
                most_bytes=self._most_bytes,
            )
            self._ending = Ending(self.files.rank_folder(self.rank), ring.meta["session"])
            self._facts = HostFacts(self.counter, telemetry=self._telemetry, samples=self._samples)
            self._writer = Writer(
                self._queues,
                self._names,
                ring,
                self._facts,
                look=self._look,
                failed=self._fail,
            )
            self._writer.flush()
            self._running = True
            self._facts.start()
            self._listening.start()
            self._writer.start()
        except Exception as error:  # noqa: BLE001 - tracing never ends training
            self._fail(error)
            return
        atexit.register(self.close)
        _in_children_silent(self)

    def close(self) -> None:
        """Stop listening and write what is left. Further calls do nothing."""
        atexit.unregister(self.close)
        self._listening.stop()
        if self._writer is None or not self._running:
            return
        self._running = False
        if self._facts is not None:
            self._facts.close()
        if not self._writer.stop(_CLOSE_SECONDS):
            logger.warning(
                "the end of the trace of rank %d is not written: %s did not take it within %g s",
                self.rank,
                self.files.root,
                _CLOSE_SECONDS,
            )
        elif self._ending is not None and self.failed is None:
            self._ending.say("closed", "", self.iteration)

    def set_level(self, level: Level) -> None:
        """Record at ``level`` from the next step on; any thread. Raises ``ConfigError``."""
        self._listening.want_level(level)

    def set_window(self, window: Window | None) -> None:
        """Record the steps of ``window`` at its level, from the next step on; any thread."""
        self._listening.want_window(window)

    def counter(self, name: str, value: float, device: int = 0) -> None:
        """One value of ``records.COUNTERS`` (or a name of one's own) now; any thread."""
        self._queues.counters.append((time.perf_counter_ns(), float(value), self._names.string(name), device))

    def note(self, **facts: Any) -> None:
        """One JSON object, with ``what=`` and the time (``time``, ns); any thread."""
        self._queues.notes.append({"time": time.perf_counter_ns(), **facts})

    def ping(self, peer: int, *, sent: int, received: int, answered: int, returned: int) -> None:
        """The four timestamps (ns) of one exchange with rank ``peer``; any thread."""
        self._queues.pings.append((sent, received, answered, returned, peer))

    def add_spans(self, spans: NDArray[np.void]) -> None:
        """Spans (``records.SPAN``, shape (n,)) made elsewhere; names and groups by ``string`` and ``group``.
        Any thread."""
        if spans.dtype != SPAN:
            raise ScanError(f"found spans of {spans.dtype}, expected {SPAN}; see scan/format/records.py")
        self._queues.spans.append(spans.tobytes())

    def string(self, text: str) -> int:
        """The number of ``text``, for ``add_spans``; any thread."""
        return self._names.string(text)

    def group(self, name: str, ranks: Sequence[int]) -> int:
        """The number of a process group, for ``add_spans``; any thread."""
        return self._names.group(name, ranks)

    def on_level(self, callback: LevelCallback) -> None:
        """Call ``callback(old, new)`` in the training thread, between two steps, when the level changes.

        Also at ``start`` (from ``off``) and at ``close`` (to ``off``)."""
        self._level_callbacks.append(callback)

    def on_look(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` in the background thread about once a second; what it does holds up the
        writing."""
        self._look_callbacks.append(callback)

    def sample(self, name: str, read: Callable[[], float | None]) -> None:
        """Record ``read()`` as counter ``name`` at every flush, in the background, unless None."""
        self._samples[name] = read

    def _controlled(self, content: Mapping[str, Any]) -> None:
        """Take over what the control file says; raises ``ConfigError``."""
        window = Window.from_dict(content["window"]) if content.get("window") else None
        level = level_of(content["level"]) if "level" in content else None
        if "window" in content:
            self.set_window(window)
        if level is not None:
            self.set_level(level)

    def _changed(self, old: Level, new: Level) -> None:
        self.note(what="level", level=new, before=old, iteration=self.iteration)
        for callback in tuple(self._level_callbacks):
            self._call(self._level_callbacks, callback, old, new)

    def _look(self) -> None:
        self._control.look()
        for callback in tuple(self._look_callbacks):
            self._call(self._look_callbacks, callback)

    def _call(self, callbacks: list[Any], callback: Callable[..., None], *args: Any) -> None:
        """One that raises is said and not called again."""
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001 - tracing never ends training
            callbacks.remove(callback)
            name = getattr(callback, "__qualname__", type(callback).__qualname__)
            logger.warning("tracing goes on without %s: %s: %s", name, type(error).__name__, error)

    def _fail(self, error: BaseException) -> None:
        """Switch the tracing off for good and say why; any thread."""
        if self.failed is not None:
            return
        self.failed = f"{type(error).__name__}: {error}"
        self._running = False
        self._listening.give_up()
        self._queues.close()
        if self._facts is not None:
            self._facts.close()
        if self._ending is not None:
            # Not in this thread, which may be the training's: the disk may be one that hangs.
            said = ("failed", self.failed, self.iteration)
            RankThread(target=self._ending.say, args=said, name="scan-ending", daemon=True).start()
        logger.warning(
            "tracing of rank %d is off from here on, training goes on: %s (trace so far: %s)",
            self.rank,
            self.failed,
            self.files.rank_folder(self.rank),
        )


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _in_children_silent(recorder: Recorder) -> None:
    _recorders.add(recorder)


def _silence_all() -> None:
    """A forked child (a loader's worker, a checkpoint's writer) has no thread that would write its events."""
    for recorder in tuple(_recorders):
        recorder._running = False
        recorder._listening.silence()
        recorder._queues.events.clear()
        if recorder._facts is not None:
            recorder._facts.hear_no_collections()
        atexit.unregister(recorder.close)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_all)
