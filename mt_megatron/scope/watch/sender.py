"""Frames to the node's sidecar, in a thread of its own: bounded, dropped and counted, never waited for.

The training thread hands over parcels: what is to become frames once the device has copied it. The thread
waits for the copies, encodes, and writes to a non-blocking Unix socket. A sidecar that is dead, frozen or
slow costs a full queue: further parcels are dropped and counted, and the counts are sent when there is room.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mt_megatron.backends.threads import RankThread
from mt_megatron.scope.format.frames import Decoder, FrameError, encode

MOST_QUEUED = 24 * 2**20
"""Bytes that wait for the sidecar, at most; with what is being encoded a rank stays below 64 MiB."""

CONNECT_SECONDS = 120.0
"""How long a sidecar may take to listen: interpreters start slowly from shared file systems."""

CLOSE_SECONDS = 2.0
"""How long the end of a run waits for what is queued."""

LATE_SECONDS = 10.0
"""How long the end of a run that was shorter than the sidecar's start waits for the sidecar to listen."""

_RETRY_SECONDS = 0.2
_PIECE = 256 * 1024

Frame = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """Frames to be made."""

    frames: Callable[[], Iterable[Frame]]
    """Makes them, in the sender's thread; waits for the device's copies."""

    size: int
    """Bytes that they keep in memory meanwhile, about."""

    must: bool = False
    """Whether it is kept even where the queue is full: few and small, and others mean nothing without it."""


class Sender:
    """One rank's connection. ``put`` is for the training thread and never waits."""

    def __init__(
        self,
        path: str,
        hello: Callable[[], Frame],
        *,
        heard: Callable[[Frame], None],
        say: Callable[[str], None],
        ended: Callable[[str], None] | None = None,
        most_bytes: int = MOST_QUEUED,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        """``path`` is the sidecar's socket, ``hello`` the first frame, ``heard`` gets the sidecar's frames
        (in the sender's thread), ``say`` a line where something is left out, ``ended`` (None: ``say``) the
        reason when nothing more is sent before the run ends."""
        self._path = path
        self._hello = hello
        self._heard = heard
        self._say = say
        self._told_end = ended or say
        self._most = most_bytes
        self._connect_seconds = connect_seconds
        self._queue: deque[Parcel] = deque()
        self._queued = 0
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._ending = threading.Event()
        self._dropped_frames = self._dropped_bytes = self._told_drops = 0
        self.connected = False
        """Whether a sidecar has ever listened."""

        self.ended: str | None = None
        """Why nothing is sent any more; None while it is."""

        self._thread = RankThread(target=self._run, name="scope-sender", daemon=True)

    def start(self) -> None:
        """Connect and send from now on."""
        self._thread.start()

    def put(self, parcel: Parcel) -> bool:
        """Queue ``parcel``; False where it was dropped and counted."""
        with self._lock:
            full = self._queued + parcel.size > self._most and not parcel.must
            if self.ended is not None or full:
                self._dropped_frames += 1
                self._dropped_bytes += parcel.size
                return False
            self._queue.append(parcel)
            self._queued += parcel.size
        self._wake()
        return True

    def count(self, size: int) -> None:
        """Count a parcel of ``size`` bytes that was left out before it came here."""
        with self._lock:
            self._dropped_frames += 1
            self._dropped_bytes += size

    @property
    def dropped(self) -> tuple[int, int]:
        """Parcels and bytes dropped so far."""
        with self._lock:
            return self._dropped_frames, self._dropped_bytes

    @property
    def waiting(self) -> int:
        """Bytes that are queued and not yet encoded."""
        return self._queued

    def close(self) -> None:
        """Send what is queued, for ``CLOSE_SECONDS`` at most, and end; a sidecar that has not yet listened is
        given ``LATE_SECONDS`` to."""
        self._ending.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(LATE_SECONDS + CLOSE_SECONDS + 1.0)
        if not self._thread.is_alive():
            for end in (self._wake_read, self._wake_write):
                with contextlib.suppress(OSError):
                    os.close(end)

    def _wake(self) -> None:
        # A full pipe wakes as well.
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def _run(self) -> None:
        link: socket.socket | None = None
        try:
            link = self._connected()
            if link is not None:
                self._serve(link)
        except (OSError, FrameError) as error:
            self._end(f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - a thread's error would only be printed
            self._end(f"an error of its own, {type(error).__name__}: {error}")
        finally:
            if link is not None:
                link.close()

    def _end(self, reason: str, unsent: int = 0) -> None:
        """What is queued is dropped, and of the parcel under way ``unsent`` bytes are."""
        with self._lock:
            if self.ended is not None:
                return
            self.ended = reason
            self._dropped_frames += len(self._queue) + bool(unsent)
            self._dropped_bytes += self._queued + unsent
            self._queued = 0
            self._queue.clear()
        if not self._ending.is_set():
            self._told_end(reason)

    def _connected(self) -> socket.socket | None:
        deadline = time.monotonic() + self._connect_seconds
        shortened = False
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                link.connect(self._path)
                link.setblocking(False)
                self.connected = True
                return link
            except OSError as error:
                link.close()
                if not os.path.isdir(os.path.dirname(self._path)):
                    # Whoever starts it takes the folder away when it has ended.
                    self._end("the sidecar has ended")
                    return None
                if self._ending.is_set() and not shortened:
                    shortened, deadline = True, min(deadline, time.monotonic() + LATE_SECONDS)
                if time.monotonic() > deadline:
                    self._end(f"no sidecar listened within {self._connect_seconds:g} s ({error})")
                    return None
            time.sleep(_RETRY_SECONDS)

    def _serve(self, link: socket.socket) -> None:
        decoder = Decoder()
        pending = _Pending(encode(self._hello()))
        deadline: float | None = None
        # Not ``select``, which takes no file numbers from 1024 on: large runs have more files open.
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        while True:
            if not pending:
                pending = self._next()
            if self._ending.is_set():
                deadline = deadline or time.monotonic() + CLOSE_SECONDS
                if not pending or time.monotonic() > deadline:
                    self._end("the run ended", len(pending))
                    return
            # Without anything to send it sleeps until it is woken or told something.
            patience = 0.2 if self._ending.is_set() else 5.0
            poller.register(link, select.POLLIN | (select.POLLOUT if pending else 0))
            ready = dict(poller.poll(1e3 * patience))
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 65536)
            state = ready.get(link.fileno(), 0)
            if state & ~select.POLLOUT:
                # Also where it was closed: there is an end to be read, or an error.
                self._receive(link, decoder)
            if state & select.POLLOUT:
                with contextlib.suppress(BlockingIOError, InterruptedError):
                    pending.sent(link.send(pending.piece()))

    def _receive(self, link: socket.socket, decoder: Decoder) -> None:
        try:
            piece = link.recv(65536)
        except (BlockingIOError, InterruptedError):
            return
        if not piece:
            raise ConnectionError("the sidecar closed the connection")
        for frame in decoder.feed(piece):
            try:
                self._heard(frame)
            except Exception as error:  # noqa: BLE001 - one message is no reason to end the recording
                self._say(f"a message of the sidecar was not understood: {type(error).__name__}: {error}")

    def _next(self) -> _Pending:
        """The bytes of the next parcel that can be encoded; empty without one."""
        while True:
            pending = self._encoded()
            if pending or not self._queue:
                return pending

    def _encoded(self) -> _Pending:
        """The bytes of the next parcel; empty without one, and where they cannot be made."""
        with self._lock:
            parcel = self._queue.popleft() if self._queue else None
            drops = (self._dropped_frames, self._dropped_bytes)
        frames: list[Frame] = []
        if drops[0] > self._told_drops:
            self._told_drops = drops[0]
            frames.append({"k": "dropped", "frames": drops[0], "bytes": drops[1]})
        if parcel is None:
            return _Pending(b"".join(encode(frame) for frame in frames))
        size = parcel.size
        try:
            data = b"".join(encode(frame) for frame in (*frames, *parcel.frames()))
        except FrameError as error:
            self._say(f"a frame is left out: {error}")
            data = b""
        finally:
            del parcel
            with self._lock:
                self._queued = max(0, self._queued - size)
        return _Pending(data)


class _Pending:
    """Bytes that are being sent."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def __len__(self) -> int:
        return len(self._data)

    def piece(self) -> memoryview:
        return self._data[:_PIECE]

    def sent(self, count: int) -> None:
        self._data = self._data[count:]
