"""Sending end of an edge: messages in the order of their posts, from any number of threads.

A post copies into the ring as far as there is credit, which needs neither the peer nor another thread. What
is left, and every message after it, is queued with its storage, and a thread of the edge's own copies it as
credit comes back.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque

import torch
from torch import Tensor

from mt_megatron.backends.threads import RankThread
from mt_megatron.comm.errors import TransferTimeout, TransportError
from mt_megatron.comm.message import FRONT, description, encode
from mt_megatron.comm.shared_memory.peers import Peer
from mt_megatron.comm.shared_memory.ring import Producer
from mt_megatron.comm.shared_memory.staging import Staged, Staging
from mt_megatron.comm.shared_memory.tensors import Unwritten, bytes_of, copy_of, in_rows, is_in_rows, is_part
from mt_megatron.comm.transport import Edge, Label

SLICE_SECONDS = 0.1
"""Longest wait in one call of a ring; between two of them the peer and the time-out are looked at."""


class Sent:
    """Handle of a message that is out."""

    def test(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return None


SENT = Sent()


class Queued:
    """Handle of a message of which a part at least has no credit yet."""

    def __init__(
        self,
        outgoing: Outgoing,
        number: int,
        tensor: Tensor | Staged,
        label: Label,
        message: tuple[bytes, int, int] | None,
        unwritten: Unwritten | None,
    ) -> None:
        self._outgoing = outgoing
        self._tensor: Tensor | Staged | None = tensor
        self._number = number
        self._label = label
        self._parts = message
        self._unwritten = unwritten
        self.is_done = False

    def parts(self, crc: bool) -> tuple[bytes, int, int]:
        """Header, address and bytes; waits for the device where the tensor lies on one."""
        if self._parts is None:
            if isinstance(self._tensor, Staged):
                self._tensor = self._tensor.wait()
            assert self._tensor is not None
            self._parts = parts(self._tensor, self._number, self._label, crc)
        return self._parts

    def require_unwritten(self) -> None:
        """Raise TransportError if the tensor was written to since its post."""
        if self._unwritten is not None:
            self._unwritten.require(self._outgoing.edge.target)

    def done(self) -> None:
        self._unwritten = None
        self.is_done = True
        self._tensor = self._parts = None

    def test(self) -> bool:
        if not self.is_done:
            self._outgoing.raise_error()
        return self.is_done

    def wait(self, timeout: float | None = None) -> None:
        if not self.is_done:
            self._outgoing.wait(self, timeout)


class Outgoing:
    """See above. ``timeout``: seconds of a wait that does not say another."""

    def __init__(
        self, edge: Edge, producer: Producer, peer: Peer, staging: Staging, timeout: float, crc: bool
    ) -> None:
        self.edge = edge
        self._producer = producer
        self._peer = peer
        self._staging = staging
        self._timeout = timeout
        self._crc = crc
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Queued] = deque()
        self._number = 0
        self._error: Exception | None = None
        self._thread: RankThread | None = None
        self._stopped = False
        self._look_at = 0.0

    def post(self, tensor: Tensor, label: Label) -> Sent | Queued:
        if self._error is not None:
            raise self._error
        if time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + SLICE_SECONDS
            self._peer.check(now=True)
        if not tensor.is_cpu:
            return self._queued(self._staging.to_host(tensor), label)
        if tensor.layout is not torch.strided or not tensor.is_contiguous() or not is_in_rows(tensor):
            tensor = in_rows(tensor)
        with self._lock:
            if not self._queue and self._error is None:
                number = self._number
                message = parts(tensor, number, label, self._crc)
                self._number = number + 1
                if self._producer.send(*message, 0):
                    return SENT
                kept, unwritten = _kept(tensor)
                # Its first chunks may be out: the header stays.
                message = message[0], kept.data_ptr(), message[2]
                return self._append(Queued(self, number, kept, label, message, unwritten))
        return self._queued(tensor, label)

    def _queued(self, tensor: Tensor | Staged, label: Label) -> Queued:
        if isinstance(tensor, Tensor):
            tensor, unwritten = _kept(tensor)
        else:
            unwritten = tensor.unwritten
        with self._lock:
            self.raise_error()
            number, message = self._number, None
            if isinstance(tensor, Tensor):
                message = parts(tensor, number, label, self._crc)
            self._number += 1
            return self._append(Queued(self, number, tensor, label, message, unwritten))

    def _append(self, queued: Queued) -> Queued:
        self._queue.append(queued)
        if self._thread is None:
            name = f"p2p-send-{self.edge.target}-{self.edge.lane}"
            thread = RankThread(target=self._send, name=name, daemon=True)
            thread.start()
            self._thread = thread
        self._changed.notify_all()
        return queued

    def raise_error(self) -> None:
        """Raise what ended this edge, if something did."""
        if self._error is not None:
            raise self._error

    def wait(self, queued: Queued | None, timeout: float | None) -> None:
        """Return when ``queued`` is out; None: everything."""
        seconds = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        with self._lock:
            while self._queue if queued is None else not queued.is_done:
                self.raise_error()
                left = deadline - time.monotonic()
                if left <= 0:
                    place = self._peer.place
                    raise TransferTimeout(
                        f"rank {self.edge.target} (process {place.pid} on {place.host}) took none or a part "
                        f"of a message on lane {self.edge.lane} in {seconds:g} s, and {len(self._queue)} "
                        "message(s) wait for it; see what that process does, or raise the time-out"
                    )
                self._changed.wait(min(left, 1.0))
        self.raise_error()

    def end(self, error: Exception) -> None:
        """Send nothing any more: every later call raises ``error``."""
        with self._lock:
            self._stopped = True
            self._error = self._error or error
            self._queue.clear()
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def forget(self, error: Exception) -> None:
        """In a forked process: no thread runs, a lock may be held for ever."""
        self._error = error
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def _send(self) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    if self._stopped:
                        return
                    self._changed.wait()
                queued = self._queue[0]
            try:
                message = queued.parts(self._crc)
                while not self._producer.send(*message, SLICE_SECONDS):
                    if self._stopped:
                        return
                    self._peer.check(now=True)
                queued.require_unwritten()
            except Exception as error:  # noqa: BLE001 - raised where somebody waits or posts.
                with self._lock:
                    self._error = self._error or error
                    self._queue.clear()
                    self._changed.notify_all()
                return
            with self._lock:
                if self._queue and self._queue[0] is queued:
                    self._queue.popleft()
                queued.done()
                self._changed.notify_all()


def parts(tensor: Tensor, number: int, label: Label, crc: bool) -> tuple[bytes, int, int]:
    """Header, address and bytes of a message; ``tensor`` lies in rows on the host."""
    if crc:
        header = encode(number, tensor.dtype, tensor.shape, label, zlib.crc32(bytes_of(tensor)))
    else:
        header = FRONT.pack(number, 0, 0) + description(tensor.dtype, tensor.shape, label)
    return header, tensor.data_ptr(), tensor.nbytes


def _kept(tensor: Tensor) -> tuple[Tensor, Unwritten | None]:
    """Queued form of ``tensor``, in rows on the host, and its guard: a copy of a part of a storage,
    which needs none, or an alias, as the ``.data`` of ``tensor`` may be exchanged."""
    alias = tensor.detach()
    return (copy_of(alias), None) if is_part(alias) else (alias, Unwritten(alias, tensor))


def closed(edge: Edge, why: str) -> TransportError:
    """For calls of an edge that is no more."""
    return TransportError(
        f"the channel from rank {edge.source} to rank {edge.target}, lane {edge.lane}, {why}"
    )
