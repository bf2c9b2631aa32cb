"""The ring in Python alone, for x86-64: the table ``PLAIN`` of ``protocol.py``.

An aligned 32-bit item of a memoryview is read and written by one instruction, and on x86-64 no load passes
an earlier load and no store an earlier store, so loads acquire and stores release. There is no fence between
a store and a later load; a publisher therefore wakes always, and the kernel compares the word again before
it lets a process sleep. Comments ``# step:`` name the steps of the table.
"""

from __future__ import annotations

import ctypes
import threading
import time

from mt_megatron.comm.message import HEADER_BYTES
from mt_megatron.comm.shared_memory.memory import Mapping, futex_wait, futex_wake
from mt_megatron.comm.shared_memory.protocol import (
    CONSUMER_WAITS,
    HEAD,
    HEADERS,
    PRODUCER_WAITS,
    TAIL,
)
from mt_megatron.comm.shared_memory.ring import NO_LIMIT, RingSize

_SPIN_SECONDS = 20e-6
"""Before sleep. Short: a thread that spins in Python keeps the others of its process from running."""

_LOW = 0xFFFFFFFF


class _End:
    def __init__(self, mapping: Mapping, size: RingSize) -> None:
        self._mapping = mapping
        self._size = size
        self._words = mapping.view(0, HEADERS).cast("I")
        self._memory = mapping.view()
        self._payload = mapping.address + size.payload_offset
        self._next = 0
        self._other = 0
        self._chunk = 0
        self.sleeps = 0

    def _header(self) -> slice:
        start = HEADERS + self._next % self._size.slots * HEADER_BYTES
        return slice(start, start + HEADER_BYTES)

    def _slot(self, counter: int) -> int:
        return self._payload + counter % self._size.slots * self._size.slot_bytes

    def _seen(self, word: int) -> None:
        self._other += (word - self._other) & _LOW


class PlainProducer(_End):
    """See ``ring.Producer``."""

    def send(self, header: bytes, address: int, nbytes: int, wait: float) -> bool:
        chunks = self._size.chunks(nbytes)
        over = self._size.passed_over(self._next, chunks)
        while self._chunk < chunks:
            counter, offset = self._next + over + self._chunk, self._chunk * self._size.slot_bytes
            count = min(nbytes - offset, self._size.slot_bytes)
            if not self._credit(counter + 1, wait):
                return False
            if not self._chunk:
                self._memory[self._header()] = header  # step: producer.header
            if count:
                ctypes.memmove(self._slot(counter), address + offset, count)  # step: producer.payload
            self._words[HEAD // 4] = (counter + 1) & _LOW  # step: producer.publish
            futex_wake(self._mapping.address + HEAD)  # step: producer.wake
            self._chunk += 1
        self._next += over + chunks
        self._chunk = 0
        return True

    def _credit(self, wanted: int, wait: float) -> bool:
        began = 0.0
        while wanted - self._other > self._size.slots:
            seen = self._words[TAIL // 4]  # step: producer.credit
            self._seen(seen)
            if wanted - self._other <= self._size.slots:
                break
            if not wait:
                return False
            began = began or time.monotonic()
            gone = time.monotonic() - began
            if gone >= wait:
                return False
            if gone < _SPIN_SECONDS:
                continue
            self.sleeps += 1
            self._words[PRODUCER_WAITS // 4] = 1  # step: producer.flag
            futex_wake(self._mapping.address + PRODUCER_WAITS)  # The consumer's drainer.
            futex_wait(self._mapping.address + TAIL, seen, wait - gone)  # step: producer.sleep
            self._words[PRODUCER_WAITS // 4] = 0  # step: producer.unflag
        return True


class PlainConsumer(_End):
    """See ``ring.Consumer``."""

    def __init__(self, mapping: Mapping, size: RingSize) -> None:
        super().__init__(mapping, size)
        self._taken = 0
        self._limit = NO_LIMIT
        self._given = 0
        self._guard = threading.Lock()

    def peek(self, wait: float) -> bytes | None:
        if not self._published(self._next + 1, wait):
            return None
        return bytes(self._memory[self._header()])  # step: consumer.header

    def receive(self, description: bytes, number: int, address: int, nbytes: int, wait: float) -> int:
        header = self.peek(wait)
        if header is None:
            return 0
        found = int.from_bytes(header[:8], "little")
        if found != number or nbytes > self._size.slot_bytes or header[-len(description) :] != description:
            return 2
        return int(self.take(address, nbytes, 0))

    def take(self, address: int, nbytes: int, wait: float) -> bool:
        chunks = self._size.chunks(nbytes)
        over = self._size.passed_over(self._next, chunks)
        while self._chunk < chunks:
            counter, offset = self._next + over + self._chunk, self._chunk * self._size.slot_bytes
            count = min(nbytes - offset, self._size.slot_bytes)
            if not self._published(counter + 1, wait):
                return False
            if count:
                ctypes.memmove(address + offset, self._slot(counter), count)  # step: consumer.payload
            self._chunk += 1
            with self._guard:
                self._taken = counter + 1
                self._give()
        self._next += over + chunks
        self._chunk = 0
        return True

    def arrived(self, nbytes: int, wait: float) -> int | None:
        chunks = self._size.chunks(nbytes)
        first = self._next + self._size.passed_over(self._next, chunks)
        if not self._chunk and self._taken < first:
            # Slots passed over are given back now: the message's last chunks may wait for that credit.
            with self._guard:
                self._taken = first
                self._give()
        if not self._published(first + chunks, wait):
            return None
        return self._slot(first) - self._mapping.address

    def hold(self, nbytes: int) -> int:
        chunks = self._size.chunks(nbytes)
        first = self._next + self._size.passed_over(self._next, chunks)
        self._next = first + chunks
        with self._guard:
            self._limit = min(self._limit, first)
            self._taken = self._next
            self._give()
        return first

    def limit(self, counter: int) -> None:
        with self._guard:
            self._limit = counter
            self._give()

    def starved(self, wait: float) -> bool:
        if not self._words[PRODUCER_WAITS // 4]:
            futex_wait(self._mapping.address + PRODUCER_WAITS, 0, wait)
        return bool(self._words[PRODUCER_WAITS // 4])

    def _give(self) -> None:
        given = min(self._taken, self._limit)
        if given <= self._given:
            return
        self._given = given
        self._words[TAIL // 4] = given & _LOW  # step: consumer.credit
        futex_wake(self._mapping.address + TAIL)  # step: consumer.wake

    def _published(self, wanted: int, wait: float) -> bool:
        began = 0.0
        while self._other < wanted:
            seen = self._words[HEAD // 4]  # step: consumer.message
            self._seen(seen)
            if self._other >= wanted:
                break
            if not wait:
                return False
            began = began or time.monotonic()
            gone = time.monotonic() - began
            if gone >= wait:
                return False
            if gone < _SPIN_SECONDS:
                continue
            self.sleeps += 1
            self._words[CONSUMER_WAITS // 4] = 1  # step: consumer.flag
            futex_wait(self._mapping.address + HEAD, seen, wait - gone)  # step: consumer.sleep
            self._words[CONSUMER_WAITS // 4] = 0  # step: consumer.unflag
        return True
