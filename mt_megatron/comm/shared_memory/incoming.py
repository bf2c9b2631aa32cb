"""Receiving end of an edge: messages in the order of their posts, taken by whichever thread waits.

A wait copies the message out chunk by chunk as it comes, or gives it in place. If more is expected than the
ring holds, a thread of the edge's own helps, but only while the sender has no credit: so a sender's wait ends
although nobody waits here, as with every library whose receives are posted ahead. The thread gives back the
slots that were passed over; it copies a message that fits the ring only for the credit of one behind it, so a
message that is expected alone is in place when its lease is asked for.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from mt_megatron.backends.threads import RankThread
from mt_megatron.comm.errors import PeerLost, TransferTimeout
from mt_megatron.comm.message import MOST_DIMS, Header, description
from mt_megatron.comm.shared_memory.memory import Mapping
from mt_megatron.comm.shared_memory.outgoing import SLICE_SECONDS
from mt_megatron.comm.shared_memory.peers import Peer
from mt_megatron.comm.shared_memory.ring import NO_LIMIT, Consumer, RingSize
from mt_megatron.comm.shared_memory.staging import Staging
from mt_megatron.comm.shared_memory.tensors import bytes_of, tensor_over
from mt_megatron.comm.transport import UNLABELLED, Edge, Label, Lease, Owned
from mt_megatron.errors import MtMegatronError

COPIED_BYTES = 4096
"""Messages up to this size are copied, by ``lease`` too: that costs less than a lease."""

_HELP_SECONDS = 0.01


class Expected:
    """Handle of a message that is expected; see ``transport.Receiving``."""

    def __init__(
        self,
        incoming: Incoming,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
        label: Label,
        out: Tensor | None,
    ) -> None:
        self._incoming = incoming
        self.shape = shape
        self.dtype = dtype
        self.asked = label
        self.out = out
        self.slots = 0
        """Of the ring, that it may need."""

        self.header: Header | None = None
        self.kind: bytes | None = None
        """Of a small message of known shape: what its header must be for the short way."""

        self.host: Tensor | None = None
        """Where it is copied to, once that has begun."""

        self.held: _Held | None = None
        self.is_there = False
        self._is_taken = False

    @property
    def label(self) -> Label:
        if self.header is None:
            return self.asked if self.is_there else UNLABELLED
        return self.header.label

    def test(self) -> bool:
        return self.is_there or self._incoming.test(self)

    def wait(self, timeout: float | None = None) -> Tensor:
        if self._is_taken:
            self._refuse()
        if not self.is_there:
            self._incoming.wait(self, timeout, leases=False)
        self._is_taken = True
        host, self.host = self.host, None
        assert host is not None
        return host if self._incoming.on_host else self._incoming.delivered(self, host)

    def lease(self, timeout: float | None = None) -> Lease:
        if self._is_taken:
            self._refuse()
        if not self.is_there:
            self._incoming.wait(self, timeout, leases=True)
        if self.held is None:
            return Owned(self.wait(timeout))
        self._is_taken = True
        held, self.held = self.held, None
        return held

    def _refuse(self) -> None:
        raise MtMegatronError(
            f"a message from rank {self._incoming.edge.source} is taken twice; keep what the first wait "
            "returned"
        )


class _Held:
    """``Lease`` of ring memory."""

    def __init__(self, incoming: Incoming, first: int, tensor: Tensor) -> None:
        self._incoming = incoming
        self._first: int | None = first
        self._tensor: Tensor | None = tensor

    def __enter__(self) -> Tensor:
        if self._tensor is None:
            raise MtMegatronError("a lease is entered after it was given back; take it anew for each message")
        return self._tensor

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tensor = None
        if self._first is not None:
            first, self._first = self._first, None
            self._incoming.give_back(first)


class Incoming:
    """See above. ``timeout``: seconds of a wait that does not say another."""

    def __init__(
        self,
        edge: Edge,
        consumer: Consumer,
        mapping: Mapping,
        size: RingSize,
        peer: Peer,
        staging: Staging,
        timeout: float,
    ) -> None:
        self.edge = edge
        self._consumer = consumer
        self._mapping: Mapping | None = mapping
        self._size = size
        self._peer = peer
        self._staging = staging
        self.on_host = staging.device.type == "cpu"
        self._timeout = timeout
        self._posted: deque[Expected] = deque()
        self._number = 0
        self._error: Exception | None = None
        self._stopped = False
        self._consuming = threading.Lock()
        """Held by the thread that uses the consumer."""

        self._waiting = 0
        self._posting = threading.Lock()
        self._posts = threading.Condition(self._posting)
        self._leasing = threading.Lock()
        self._leases: list[int] = []
        self._slots = 0
        self._helper: RankThread | None = None

    def post(
        self,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
        label: Label,
        out: Tensor | None,
    ) -> Expected:
        self._raise()
        if out is not None and (
            not out.is_contiguous() or out.dtype != dtype or (shape is not None and out.shape != tuple(shape))
        ):
            raise MtMegatronError(
                f"found out= of shape {tuple(out.shape)}, {out.dtype}, contiguous: {out.is_contiguous()}; "
                f"expected a contiguous tensor of shape {shape} and {dtype}"
            )
        if out is not None and self.on_host and out.device.type != "cpu":
            raise MtMegatronError(
                f"found out= on {out.device}; expected memory of the host, where this channel receives. "
                "Leave out= away"
            )
        if out is not None:
            # Nothing larger may be copied there; headers say every message's shape.
            shape = tuple(out.shape)
        expected = Expected(self, shape, dtype, label, out)
        if shape is None:
            expected.slots = self._size.slots + 1  # It may be larger than the ring.
        else:
            shape = tuple(shape)
            nbytes = math.prod(shape) * dtype.itemsize
            # With the slots that may be passed over at the ring's end, to be contiguous: at most chunks - 1.
            expected.slots = 2 * self._size.chunks(nbytes) - 1
            if nbytes <= COPIED_BYTES and self.on_host and len(shape) <= MOST_DIMS:
                expected.host = torch.empty(shape, dtype=dtype, device="cpu") if out is None else out
                expected.kind = description(dtype, shape, label)
        with self._posting:
            self._posted.append(expected)
            self._slots += expected.slots
            if self._slots > self._size.slots and self._helper is None:
                name = f"p2p-receive-{self.edge.source}-{self.edge.lane}"
                self._helper = RankThread(target=self._help, name=name, daemon=True)
                self._helper.start()
            if self._helper is not None:
                self._posts.notify_all()
        return expected

    def wait(self, expected: Expected, timeout: float | None, *, leases: bool) -> None:
        """Return when ``expected`` is there, in place if ``leases`` and it fits the ring."""
        seconds = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        if not self._consuming.acquire(blocking=False) and not self._queue_up(expected, deadline, seconds):
            return
        try:
            if expected.kind is not None and self._receive_small(expected, min(seconds, SLICE_SECONDS)):
                return
            while not expected.is_there:
                self._raise()
                front = self._posted[0]
                left = deadline - time.monotonic()
                if self._advance(front, max(0.0, min(left, SLICE_SECONDS)), leases and front is expected):
                    continue
                self._check_peer(front, leases and front is expected)
                if left <= 0 and not front.is_there:
                    raise self._late(seconds)
        finally:
            self._consuming.release()

    def _receive_small(self, expected: Expected, wait: float) -> bool:
        """The short way of ``_advance``, in one call, if it is next and as expected."""
        if self._error is not None or expected.is_there or self._posted[0] is not expected:
            return False
        host, kind = expected.host, expected.kind
        if host is None or kind is None or expected.header is not None:
            return False
        if self._consumer.receive(kind, self._number, host.data_ptr(), host.nbytes, wait) != 1:
            return False
        self._arrived(expected)
        return True

    def _queue_up(self, expected: Expected, deadline: float, seconds: float) -> bool:
        """Get the consumer after the thread that has it; the helper gives way. False: not needed any more, as
        that thread has taken ``expected`` on its way to a later message."""
        with self._posting:
            self._waiting += 1
        try:
            while not self._consuming.acquire(timeout=SLICE_SECONDS):
                if expected.is_there:
                    return False
                self._raise()
                if time.monotonic() > deadline:
                    raise self._late(seconds)
            return True
        finally:
            with self._posting:
                self._waiting -= 1

    def test(self, expected: Expected) -> bool:
        """Whether a wait for ``expected`` would not wait for the peer."""
        self._raise()
        if not self._consuming.acquire(blocking=False):
            return expected.is_there
        try:
            while not expected.is_there:
                front = self._posted[0]
                if front is expected and self._is_whole(front):
                    return True
                if not self._advance(front, 0, False, copies=front is not expected):
                    self._check_peer(front, False)
                    return front.is_there and front is expected
            return True
        finally:
            self._consuming.release()

    def delivered(self, expected: Expected, host: Tensor) -> Tensor:
        """The copy ``host`` on the device."""
        return self._staging.to_device(host, expected.out)

    def give_back(self, first: int) -> None:
        """The lease of the message at counter ``first`` is over."""
        with self._leasing:
            self._leases.remove(first)
            self._consumer.limit(min(self._leases, default=NO_LIMIT))

    def unfinished(self) -> int:
        """Messages expected and not there."""
        return len(self._posted)

    def end(self, error: Exception) -> None:
        """Receive nothing any more: every later call raises ``error``. Tensors of leases stay."""
        with self._posting:
            self._stopped = True
            self._error = self._error or error
            self._posts.notify_all()
        if self._helper is not None and self._helper is not threading.current_thread():
            self._helper.join()
        with self._consuming:
            self._posted.clear()
            self._mapping = None

    def forget(self, error: Exception) -> None:
        """In a forked process: no thread runs, a lock may be held for ever."""
        self._error = error
        self._consuming, self._posting = threading.Lock(), threading.Lock()
        self._posts = threading.Condition(self._posting)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_peer(self, front: Expected, leases: bool) -> None:
        """Raise PeerLost, unless the peer is there or had sent the message before it went."""
        try:
            self._peer.check(now=True)
        except PeerLost as error:
            if not self._advance(front, 0, leases):
                self._error = error
                raise

    def _needs_help(self) -> bool:
        return self._slots > self._size.slots and bool(self._posted)

    def _advance(self, front: Expected, wait: float, leases: bool, *, copies: bool = True) -> bool:
        """One try of up to ``wait`` s at the first message that is expected; True when it is there."""
        header = front.header
        if header is None:
            encoded = self._consumer.peek(wait)
            if encoded is None:
                return False
            header = self._checked(front, encoded)
        nbytes = header.nbytes
        if leases and self.on_host and front.out is None and front.host is None:
            chunks = self._size.chunks(nbytes)
            if nbytes and chunks <= self._size.slots:
                return self._hold(front, header, nbytes, wait)
        if not copies:
            return False
        if front.host is None:
            if self.on_host:
                host = front.out
                if host is None:
                    host = torch.empty(header.shape, dtype=header.dtype, device="cpu")
            else:
                host = self._staging.host_memory(header.shape, header.dtype)
            front.host = host
        if not self._consumer.take(front.host.data_ptr() if nbytes else 0, nbytes, wait):
            return False
        if header.crc is not None:
            self._check_crc(header, bytes_of(front.host))
        self._arrived(front)
        return True

    def _hold(self, front: Expected, header: Header, nbytes: int, wait: float) -> bool:
        offset = self._consumer.arrived(nbytes, wait)
        if offset is None:
            return False
        assert self._mapping is not None
        memory = self._mapping.view(offset, nbytes)
        if header.crc is not None:
            self._check_crc(header, memory)
        with self._leasing:
            first = self._consumer.hold(nbytes)
            self._leases.append(first)
        front.held = _Held(self, first, tensor_over(memory, header.shape, header.dtype))
        self._arrived(front)
        return True

    def _is_whole(self, front: Expected) -> bool:
        if front.header is None:
            encoded = self._consumer.peek(0)
            if encoded is None:
                return False
            self._checked(front, encoded)
        assert front.header is not None
        if self._size.chunks(front.header.nbytes) > self._size.slots:
            return self._advance(front, 0, False)
        return self._consumer.arrived(front.header.nbytes, 0) is not None

    def _checked(self, front: Expected, encoded: bytes) -> Header:
        try:
            header = Header.decode(encoded)
            header.require(
                self.edge, sequence=self._number, shape=front.shape, dtype=front.dtype, label=front.asked
            )
        except MtMegatronError as error:
            self._error = error
            raise
        front.header = header
        return header

    def _check_crc(self, header: Header, memory: memoryview) -> None:
        try:
            header.require_crc(self.edge, memory)
        except MtMegatronError as error:
            self._error = error
            raise

    def _arrived(self, front: Expected) -> None:
        self._number += 1
        with self._posting:
            self._posted.popleft()
            self._slots -= front.slots
        front.is_there = True

    def _late(self, seconds: float) -> TransferTimeout:
        place = self._peer.place
        leases = f", {len(self._leases)} lease(s) not given back" if self._leases else ""
        return TransferTimeout(
            f"message {self._number} from rank {self.edge.source} (process {place.pid} on {place.host}), "
            f"lane {self.edge.lane}, did not come in {seconds:g} s{leases}; see what that process does, or "
            "raise the time-out"
        )

    def _help(self) -> None:
        while True:
            with self._posting:
                while not self._needs_help() and not self._stopped:
                    self._posts.wait()
            if self._stopped or self._error is not None:
                return
            if not self._consumer.starved(SLICE_SECONDS):
                continue
            if self._waiting or not self._consuming.acquire(timeout=_HELP_SECONDS):
                time.sleep(_HELP_SECONDS)
                continue
            try:
                # Whoever had the consumer may have taken what needed help.
                if self._needs_help() and not self._spares(self._posted[0]):
                    self._advance(self._posted[0], _HELP_SECONDS, False)
            except Exception as error:  # noqa: BLE001 - raised where somebody waits or posts.
                self._error = self._error or error
                return
            finally:
                self._consuming.release()

    def _spares(self, front: Expected) -> bool:
        """Count the slots of ``front`` by its header instead of by the most that it may need, and give back
        those that it passed over; True where that was less, so that help may be over without a copy."""
        if front.host is not None:
            return False
        if front.header is None:
            encoded = self._consumer.peek(_HELP_SECONDS)
            if encoded is None:
                return True
            self._checked(front, encoded)
        assert front.header is not None
        nbytes = front.header.nbytes
        chunks = self._size.chunks(nbytes)
        if chunks > self._size.slots or chunks == front.slots:
            return False
        self._consumer.arrived(nbytes, 0)
        with self._posting:
            self._slots -= front.slots - chunks
            front.slots = chunks
        return True
