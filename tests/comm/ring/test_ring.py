"""Both implementations of a ring, and either with the other, against a queue; counters that wrap."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from typing import Any

import pytest

from mt_megatron.comm.message import HEADER_BYTES
from mt_megatron.comm.shared_memory import memory, native
from mt_megatron.comm.shared_memory.native import NativeConsumer, NativeProducer
from mt_megatron.comm.shared_memory.plain import PlainConsumer, PlainProducer
from mt_megatron.comm.shared_memory.protocol import HEAD, TAIL
from mt_megatron.comm.shared_memory.ring import NO_LIMIT, RingSize

PRODUCERS = {"native": NativeProducer, "python": PlainProducer}
CONSUMERS = {"native": NativeConsumer, "python": PlainConsumer}
SIZE = RingSize(4096, 5)
RING = SIZE.slots * SIZE.slot_bytes


def ends(
    producer: str, consumer: str, begin: int, stream_bytes: int | None = None
) -> tuple[Any, Any, memory.Mapping]:
    """Two ends in this process whose counters begin at ``begin``, a multiple of the slots. ``stream_bytes``:
    what native ones take for larger than the caches."""
    if "native" in (producer, consumer) and isinstance(native.load(), str):
        pytest.skip(str(native.load()))
    if "python" in (producer, consumer) and native.why_not_plain() is not None:
        pytest.skip(str(native.why_not_plain()))
    descriptor = memory.create(SIZE.nbytes)
    mapping = memory.Mapping(descriptor, SIZE.nbytes)
    words = mapping.view(0, 4096).cast("I")
    words[HEAD // 4] = words[TAIL // 4] = begin & 0xFFFFFFFF
    made = PRODUCERS[producer](mapping, SIZE), CONSUMERS[consumer](mapping, SIZE)
    for end in made:
        fields = ("next", "other", "taken", "given")
        if hasattr(end, "_state"):
            for name in fields:
                setattr(end._state, name, begin)
            if stream_bytes is not None:
                end._state.stream_bytes = stream_bytes
        else:
            for name in fields:
                setattr(end, f"_{name}", begin)
    return *made, mapping


def content(number: int, nbytes: int) -> bytes:
    return random.Random(number).randbytes(nbytes)


@pytest.mark.parametrize("begin", [0, 2**32 - 6, 2**33 - 12], ids=["zero", "wraps", "wraps again"])
@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("stream_bytes", [None, 1], ids=["cached", "past the caches"])
def test_a_ring_is_a_queue(producer: str, consumer: str, begin: int, stream_bytes: int | None) -> None:
    begin -= begin % SIZE.slots
    source, sink, mapping = ends(producer, consumer, begin, stream_bytes)
    draws = random.Random(begin)
    queue: deque[tuple[bytes, bytes]] = deque()
    held: list[tuple[int, int, bytes]] = []
    pending: tuple[bytes, Any, int] | None = None
    target = ctypes.create_string_buffer(4 * RING)
    shift = 0
    taking: tuple[bytes, bytes] | None = None
    received = number = 0
    while received < 150:
        if draws.random() < 0.5:
            if pending is None:
                nbytes = draws.choice([0, 1, 4096, 5000, RING, draws.randrange(3 * RING)])
                body = content(number, nbytes)
                header = content(-1 - number, HEADER_BYTES)
                pending = header, ctypes.create_string_buffer(body, max(1, nbytes)), nbytes
                queue.append((header, body))
                number += 1
            header, memory_of, nbytes = pending
            if source.send(header, ctypes.addressof(memory_of), nbytes, 0):
                ctypes.memset(memory_of, 0, max(1, nbytes))
                pending = None
        elif held and draws.random() < 0.4:
            first, offset, body = held.pop(draws.randrange(len(held)))
            assert bytes(mapping.view(offset, len(body))) == body
            sink.limit(min((each[0] for each in held), default=NO_LIMIT))
        elif taking is None:
            peeked = sink.peek(0)
            if peeked is not None:
                assert peeked == queue[0][0]
                taking, shift = queue.popleft(), draws.randrange(130)
        else:
            body = taking[1]
            if 0 < len(body) <= RING and draws.random() < 0.5 and not _begun(sink):
                offset = sink.arrived(len(body), 0)
                if offset is not None:
                    held.append((sink.hold(len(body)), offset, body))
                    taking, received = None, received + 1
            elif sink.take(ctypes.addressof(target) + shift, len(body), 0):
                assert target.raw[shift : shift + len(body)] == body
                taking, received = None, received + 1
    assert received == 150


def _begun(sink: Any) -> bool:
    return bool(sink._state.chunk if hasattr(sink, "_state") else sink._chunk)


@pytest.mark.parametrize("kind", PRODUCERS)
def test_one_call_takes_what_was_expected_alone(kind: str) -> None:
    source, sink, _ = ends(kind, kind, 0)
    target = ctypes.create_string_buffer(3 * SIZE.slot_bytes)
    at = ctypes.addressof(target)
    described = content(1, 112)
    header = (7).to_bytes(8, "little") + bytes(8) + described
    assert sink.receive(described, 7, at, 3, 0) == 0
    assert source.send(header, ctypes.addressof(ctypes.create_string_buffer(b"abc")), 3, 0)
    assert sink.receive(described, 6, at, 3, 0) == 2
    assert sink.receive(content(2, 112), 7, at, 3, 0) == 2
    assert sink.receive(described, 7, at, 2 * SIZE.slot_bytes, 0) == 2
    assert sink.peek(0) == header
    assert sink.receive(described, 7, at, 3, 0) == 1 and target.raw[:3] == b"abc"
    assert sink.receive(described, 8, at, 3, 0.01) == 0 and sink.sleeps > 0


@pytest.mark.parametrize("kind", PRODUCERS)
def test_a_producer_without_credit_shows(kind: str) -> None:
    source, sink, _ = ends(kind, kind, 0)
    large = ctypes.create_string_buffer(RING + 1)
    arguments = content(1, HEADER_BYTES), ctypes.addressof(large), RING + 1
    assert not source.send(*arguments, 0) and not sink.starved(0.001)
    assert not source.send(*arguments, 0.01) and source.sleeps > 0
    assert not sink.starved(0.001)
    assert sink.peek(0) is not None and not sink.take(ctypes.addressof(large), RING + 1, 0)
    assert source.send(*arguments, 0) and sink.take(ctypes.addressof(large), RING + 1, 0)
