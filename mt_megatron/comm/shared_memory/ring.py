"""One end of a ring: which implementation there is, and what both of them do.

``native.py`` calls the C helper; ``plain.py`` is Python alone and needs the strong memory order of x86-64.
Times are seconds; ``wait`` 0 means: do not wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mt_megatron.comm.message import HEADER_BYTES
from mt_megatron.comm.shared_memory.protocol import HEADERS, PAGE

NO_LIMIT = 2**64 - 1
"""For ``Consumer.limit``: no message is read in place."""


@dataclass(frozen=True)
class RingSize:
    """Of one directed edge's ring."""

    slot_bytes: int = 1 << 19
    """Bytes of a slot, a multiple of 4,096; a larger message is sent in chunks of that size. Rings of 2 to
    4 MiB are quickest: they stay in the caches."""

    slots: int = 8
    """Slots, at least 2. A message of up to ``slots * slot_bytes`` can be read in place."""

    @property
    def payload_offset(self) -> int:
        return -(-(HEADERS + self.slots * HEADER_BYTES) // PAGE) * PAGE

    @property
    def nbytes(self) -> int:
        """Of the whole memory."""
        return self.payload_offset + self.slots * self.slot_bytes

    def chunks(self, nbytes: int) -> int:
        """Slots that a message of ``nbytes`` takes, one after another."""
        return -(-nbytes // self.slot_bytes) or 1

    def passed_over(self, position: int, chunks: int) -> int:
        """Slots before the ring's end that a message of ``chunks`` leaves empty so as to be contiguous, if
        it is next at counter ``position``."""
        position %= self.slots
        return self.slots - position if 1 < chunks <= self.slots < position + chunks else 0


class Producer(Protocol):
    """The sending end. Calls come from one thread at a time."""

    def send(self, header: bytes, address: int, nbytes: int, wait: float) -> bool:
        """Publish a message as far as there is credit, waiting for each chunk's for up to ``wait`` s. True
        when the message is out; after False call again with the same arguments."""


class Consumer(Protocol):
    """The receiving end. Calls come from one thread at a time, those of ``limit`` from any."""

    def peek(self, wait: float) -> bytes | None:
        """The next message's header, or None after ``wait`` s. Until the message is taken it is next."""

    def receive(self, description: bytes, number: int, address: int, nbytes: int, wait: float) -> int:
        """Copy the next message in one call: 1. 0: none came in ``wait`` s; 2: the next one is not of this
        number and description, or has several chunks, and stays next."""

    def take(self, address: int, nbytes: int, wait: float) -> bool:
        """Copy the next message, waiting for each chunk for up to ``wait`` s. True when all is copied;
        after False call again with the same arguments."""

    def arrived(self, nbytes: int, wait: float) -> int | None:
        """Offset in the memory of the next message, which fits the ring and whose header was read, once all
        of it is there; None after ``wait`` s."""

    def hold(self, nbytes: int) -> int:
        """Go past that message and keep its memory; returns the counter at which it begins."""

    def limit(self, counter: int) -> None:
        """Give the memory of everything taken before ``counter`` back to the producer."""

    def starved(self, wait: float) -> bool:
        """Whether the producer sleeps for want of credit, now or within ``wait`` s."""
