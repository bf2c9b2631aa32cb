"""The thread that writes the recording: frames wait for it in bounded buffers, one a rank.

A buffer above ``SOFT_BYTES`` takes no tensors and tokens any more, which are dropped and counted; above
``HARD_BYTES`` its socket is not read, so that the rank's own queue drops and counts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mt_megatron.scope.recording.writer import TICK_SECONDS, Writer

SOFT_BYTES = 24 * 2**20
HARD_BYTES = 32 * 2**20
"""Of frames of one rank that wait to be written. A step's tensors and tokens have room below the first."""

WAKE_BYTES = 4 * 2**20
"""The thread does not wait for the end of a tick when so much waits."""

_LARGE = ("tensor", "tokens")


class Keeper:
    """Owns the writer once started."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._stir = threading.Event()
        self._frames: deque[tuple[int, Mapping[str, Any], int]] = deque()
        self._calls: deque[Callable[[Writer], None]] = deque()
        self._held: dict[int, int] = {}
        self._dropped: dict[int, list[int]] = {}
        self._told: dict[tuple[str, int], tuple[int, int]] = {}
        self._over = False
        self._thread = threading.Thread(target=self._run, name="scope-recording", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def put(self, rank: int, frame: Mapping[str, Any]) -> bool:
        """Keep ``frame`` for the writer; False: it was dropped and counted."""
        size = frame_bytes(frame)
        with self._lock:
            held = self._held.get(rank, 0)
            large = frame.get("k") in _LARGE
            if (large and held + size > SOFT_BYTES and held) or held > 2 * HARD_BYTES:
                count = self._dropped.setdefault(rank, [0, 0])
                count[0] += 1
                count[1] += size
                return False
            self._frames.append((rank, frame, size))
            self._held[rank] = held + size
            wake = held + size > WAKE_BYTES
        if wake:
            self._stir.set()
        return True

    def has_room(self, rank: int) -> bool:
        """Whether the rank's socket may be read."""
        return self._held.get(rank, 0) <= HARD_BYTES

    def call(self, what: Callable[[Writer], None]) -> None:
        """Let the thread call ``what`` with the writer."""
        with self._lock:
            self._calls.append(what)

    def dropped(self) -> dict[int, tuple[int, int]]:
        """Frames and bytes that were dropped or refused here or by the writer, by rank."""
        return _sums(self._without_room(), self._writer.refused)

    def _without_room(self) -> dict[int, tuple[int, int]]:
        with self._lock:
            here = {rank: (count[0], count[1]) for rank, count in self._dropped.items()}
        return _sums(here, self._writer.lost)

    @property
    def stopped(self) -> str | None:
        """Why nothing is recorded any more."""
        return self._writer.stopped

    def flush(self, seconds: float = 30.0) -> None:
        """Wait until what is here now is written."""
        done = threading.Event()
        self.call(lambda writer: writer.tick([], final=True))
        self.call(lambda _: done.set())
        self._stir.set()
        if self._thread.is_alive():
            done.wait(seconds)

    def close(self, seconds: float = 30.0) -> None:
        """Write what waits, close the file."""
        self._over = True
        self._stir.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        else:
            self._tick(final=True)

    def _run(self) -> None:
        while not self._over:
            self._stir.wait(TICK_SECONDS)
            self._stir.clear()
            self._tick(final=False)
        self._tick(final=True)

    def _tick(self, *, final: bool) -> None:
        with self._lock:
            frames, self._frames = self._frames, deque()
            calls, self._calls = self._calls, deque()
        self._writer.tick([(rank, frame) for rank, frame, _ in frames])
        for what in calls:
            what(self._writer)
        for source, counts in (("sidecar", self._without_room()), ("checks", self._writer.refused)):
            for rank, count in counts.items():
                if self._told.get((source, rank)) != count:
                    self._told[source, rank] = count
                    self._writer.dropped(source, rank, *count)
        with self._lock:
            for rank, _, size in frames:
                self._held[rank] -= size
        if final:
            self._writer.close()


def _sums(
    counts: Mapping[int, tuple[int, int]], more: Mapping[int, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    none = (0, 0)
    pairs = {rank: (counts.get(rank, none), more.get(rank, none)) for rank in (*counts, *more)}
    return {rank: (one[0] + other[0], one[1] + other[1]) for rank, (one, other) in pairs.items()}


def frame_bytes(frame: Mapping[str, Any]) -> int:
    """Memory of a frame's arrays, and some for the rest."""
    size = 256
    for value in frame.values():
        if isinstance(value, np.ndarray):
            size += value.nbytes
        elif isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, list):
            size += 64 * len(value)
    return size
