"""The two ends of a directed edge over RDMA, on bytes: no tensor, no torch.

A message is cut into fragments of at most a slot. Each slot has two parts at the receiver: 128 bytes for the
header, which the first fragment of a message fills, and the payload. In host memory the two lie side by side,
so one write fills both; the payload may instead lie in a device's memory. The sender copies a fragment into
staging memory of the same layout and writes it from there, so what is sent is free as soon as its last
fragment is staged.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mt_megatron.comm.errors import TransportError
from mt_megatron.comm.rdma.ring import ReceiveRing, SendRing
from mt_megatron.comm.rdma.verbs import Bytes, Device, Region

if TYPE_CHECKING:
    from mt_megatron.comm.rdma.link import Link

HEADER_BYTES = 128
"""As in ``comm.message``, which needs torch."""


class Source(Protocol):
    """A message that is sent."""

    nbytes: int
    """Of the payload."""

    waits: bool
    """Whether ``await_device`` has to be called first, by a thread that may wait."""

    def await_device(self) -> None:
        """Return when the device has computed the message; ``waits`` is False then."""

    def header(self, sequence: int) -> bytes:
        """``HEADER_BYTES`` for the message of this number."""

    def hold(self) -> None:
        """It is read after its post: keep what that needs."""

    def read(self, offset: int, slot: Slot, nbytes: int) -> None:
        """Copy bytes from ``offset`` on into the staging memory ``slot``; complete on return."""

    def finish(self, target: int) -> None:
        """All bytes are read. Raises TransportError if they were written to since the post; ``target``: the
        rank that gets them."""


class Sink(Protocol):
    """Memory of a message that arrives."""

    nbytes: int

    def write(self, offset: int, slot: Slot, nbytes: int) -> None:
        """Copy ``nbytes`` of ``slot`` to ``offset``; complete on return."""

    def finish(self) -> None:
        """All bytes are written: check them. Raises MessageMismatch."""


@dataclass(frozen=True)
class Slot:
    """Payload memory of one slot, on the host or on a device."""

    region: Region
    offset: int
    """Of the slot in ``region``."""


class Memory:
    """Header and payload memory of a ring of slots, registered."""

    def __init__(
        self, device: Device, slots: int, slot_bytes: int, payload: Callable[[int], Region] | None = None
    ) -> None:
        """``payload``: makes the payload's region of so many bytes; None: host memory beside the headers."""
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.is_one = payload is None
        if payload is None:
            self.headers = self.payload = device.region(slots * (HEADER_BYTES + slot_bytes))
            return
        self.headers = device.region(slots * HEADER_BYTES)
        try:
            self.payload = payload(slots * slot_bytes)
        except BaseException:
            self.headers.close()
            raise

    def header_at(self, number: int) -> int:
        """Offset of slot ``number``'s header in ``headers``."""
        return number * (HEADER_BYTES + self.slot_bytes if self.is_one else HEADER_BYTES)

    def slot(self, number: int) -> Slot:
        """Payload memory of slot ``number``."""
        if self.is_one:
            return Slot(self.payload, self.header_at(number) + HEADER_BYTES)
        return Slot(self.payload, number * self.slot_bytes)

    def header(self, number: int) -> Bytes:
        """Header memory of slot ``number``, ``HEADER_BYTES`` long."""
        at = self.header_at(number)
        return self.headers.bytes[at : at + HEADER_BYTES]

    @property
    def offer(self) -> dict[str, Any]:
        """What the sender needs to write here; for JSON."""
        return {
            "slots": self.slots,
            "slot_bytes": self.slot_bytes,
            "is_one": self.is_one,
            "headers": [self.headers.address, self.headers.remote_key],
            "payload": [self.payload.address, self.payload.remote_key],
            "extra": [self.headers.extra] if self.is_one else [self.headers.extra, self.payload.extra],
        }

    def close(self) -> None:
        self.payload.close()
        if not self.is_one:
            self.headers.close()


@dataclass
class Departure:
    """A message that is being sent."""

    sequence: int
    source: Source
    staged: int = 0
    """Bytes of the payload that are in staging memory or further."""

    is_staged: bool = False
    """Whether the source is free."""


class Outgoing:
    """The sender's end."""

    def __init__(
        self, link: Link, lane: int, memory: Memory, offer: dict[str, Any], defer: Callable[[Outgoing], None]
    ) -> None:
        """``offer``: the receiver's ``Memory.offer``. ``defer``: has ``await_device`` called by a thread that
        may wait for a device."""
        self.lane = lane
        self.link = link
        self.ring = SendRing(memory.slots)
        self.changed = threading.Condition(threading.RLock())
        self.failure: TransportError | None = None
        self._sequence = 0
        self._memory = memory
        self._headers = (int(offer["headers"][0]), int(offer["headers"][1]))
        self._payload = (int(offer["payload"][0]), int(offer["payload"][1]))
        for extra in offer["extra"]:
            link.pair.learn(extra)
        self._queue: deque[Departure] = deque()
        self._defer = defer

    def post(self, source: Source) -> Departure:
        """Queue a message."""
        with self.changed:
            if self.failure is not None:
                raise self.failure
            departure = Departure(self._sequence, source)
            self._sequence += 1
            self._queue.append(departure)
            self._advance()
            if not departure.is_staged:
                source.hold()
            return departure

    def credit(self, low_bits: int) -> None:
        """The receiver has copied out fragments."""
        with self.changed:
            self.ring.credit(low_bits)
            self._advance()
            self.changed.notify_all()

    def acknowledge(self, slot: int) -> None:
        """A write from ``slot`` is complete."""
        with self.changed:
            self.ring.acknowledge(slot)
            self._advance()
            self.changed.notify_all()

    def is_over(self) -> bool:
        """Whether every message has reached the receiver's memory."""
        return not self._queue and self.ring.delivered()

    def waiting(self) -> int:
        """Messages that are not staged, as the ring is full."""
        return len(self._queue)

    def abandon(self, error: TransportError) -> None:
        """Drop what is not staged; whoever waits for it gets ``error``."""
        with self.changed:
            self.failure = self.failure or error
            self._queue.clear()
            self.changed.notify_all()

    def await_device(self) -> None:
        """Wait for the device of the first message, without the lock, then go on as far as there is room."""
        with self.changed:
            source = self._queue[0].source if self._queue else None
        if source is not None and source.waits:
            source.await_device()
        with self.changed:
            self._advance()

    def close(self) -> None:
        self._memory.close()

    def _advance(self) -> None:
        """Stage and write what the ring has room for and no device has to be waited for."""
        while self._queue and self.ring.free() and self.link.end() is None:
            if self._queue[0].source.waits:
                self._defer(self)
                return
            self._stage(self._queue[0])

    def _stage(self, departure: Departure) -> None:
        memory = self._memory
        nbytes = min(memory.slot_bytes, departure.source.nbytes - departure.staged)
        number = self.ring.sent % self.ring.slots
        slot = memory.slot(number)
        parts: list[tuple[Region, int, int, int, int]] = []
        header_bytes = 0
        if departure.staged == 0:
            memory.header(number)[:] = np.frombuffer(
                departure.source.header(departure.sequence), dtype=np.uint8
            )
            header_bytes = HEADER_BYTES
        if nbytes:
            departure.source.read(departure.staged, slot, nbytes)
        if memory.is_one:
            at = slot.offset - header_bytes
            parts.append((slot.region, at, header_bytes + nbytes, self._payload[0] + at, self._payload[1]))
        else:
            if header_bytes:
                at = memory.header_at(number)
                parts.append((memory.headers, at, header_bytes, self._headers[0] + at, self._headers[1]))
            if nbytes:
                at = slot.offset
                parts.append((slot.region, at, nbytes, self._payload[0] + at, self._payload[1]))
        self.ring.take(len(parts))
        self.link.write_fragment(self, number, parts)
        departure.staged += nbytes
        if departure.staged == departure.source.nbytes:
            try:
                departure.source.finish(self.link.peer)
            except TransportError as error:
                self.abandon(error)
                return
            departure.is_staged = True
            del departure.source  # handles are kept longer than the tensor has to be
            self._queue.popleft()
            self.changed.notify_all()


class Arrival:
    """A message that is expected."""

    def __init__(self, begin: Callable[[bytes, int], Sink]) -> None:
        """``begin``: the sink for a message with this header and sequence number. Raises MessageMismatch."""
        self.begin = begin
        self.sink: Sink | None = None
        self.copied = 0
        self.is_over = False


class Incoming:
    """The receiver's end."""

    def __init__(self, link: Link, lane: int, memory: Memory) -> None:
        self.lane = lane
        self.link = link
        self.ring = ReceiveRing(memory.slots)
        self.changed = threading.Condition(threading.RLock())
        self.failure: TransportError | None = None
        self._memory = memory
        self._sequence = 0
        self._expected: deque[Arrival] = deque()

    @property
    def offer(self) -> dict[str, Any]:
        """See ``Memory.offer``."""
        return self._memory.offer

    def post(self, arrival: Arrival) -> None:
        """Expect the next message."""
        with self.changed:
            self._expected.append(arrival)
            self._advance()

    def arrive(self, slot: int) -> None:
        """A fragment lies in ``slot``."""
        with self.changed:
            self.ring.arrive(slot)
            self._advance()

    def expected(self) -> int:
        """Messages that have not arrived."""
        return len(self._expected)

    def abandon(self, error: TransportError) -> None:
        """Drop what is expected; whoever waits for it gets ``error``."""
        with self.changed:
            self.failure = self.failure or error
            self._expected.clear()
            self.changed.notify_all()

    def close(self) -> None:
        self._memory.close()

    def _advance(self) -> None:
        while self._expected and self.failure is None and (number := self.ring.next_slot()) is not None:
            try:
                self._take(self._expected[0], number)
            except TransportError as error:
                # What follows cannot be told apart from the rest of this message.
                self.failure = error
                self.changed.notify_all()
                break
            self.ring.consume()
            self._send_credit(more_follows=True)
        self._send_credit(more_follows=False)

    def _send_credit(self, *, more_follows: bool) -> None:
        due = self.ring.credit_due(more_follows=more_follows)
        if due is not None:
            self.link.send_credit(self.lane, due)

    def _take(self, arrival: Arrival, number: int) -> None:
        if arrival.sink is None:
            arrival.sink = arrival.begin(self._memory.header(number).tobytes(), self._sequence)
            self._sequence += 1
        nbytes = min(self._memory.slot_bytes, arrival.sink.nbytes - arrival.copied)
        if nbytes:
            arrival.sink.write(arrival.copied, self._memory.slot(number), nbytes)
        arrival.copied += nbytes
        if arrival.copied == arrival.sink.nbytes:
            arrival.sink.finish()
            arrival.is_over = True
            self._expected.popleft()
            self.changed.notify_all()
