"""The ring's layout in memory and the steps of its protocol, as data.

One producer and one consumer, in two processes. ``head`` counts chunks published, ``tail`` chunks whose
memory is free again; a chunk with counter ``i`` lies in slot ``i % slots``. The tables name every access to
shared memory with its memory order. ``ring.c`` performs the table ``NATIVE`` and ``plain.py`` the table
``PLAIN``; the tests compare both with the tables, and a model checker explores every execution of the tables
that the C11 memory model allows.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

HEAD, CONSUMER_WAITS, TAIL, PRODUCER_WAITS = 64, 128, 192, 256
"""Offsets of 32-bit words, each in a cache line of its own; the first line holds the format."""

HEADERS = 4096
"""Offset of the message headers, one for each slot."""

PAGE = 4096
MAGIC = 0x52544D4D
VERSION = 1


class Do(Enum):
    """Kind of a step."""

    LOAD = "load"
    STORE = "store"
    FENCE = "fence"
    READ = "read"
    """Of the header or payload: not atomic."""
    WRITE = "write"
    SLEEP = "sleep"
    """The kernel sleeps if the word has still the value that was seen, as one atomic step."""
    WAKE = "wake"


class Order(Enum):
    """Memory orders of C11."""

    RELAXED = "relaxed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    SEQ_CST = "seq_cst"
    NONE = "none"
    """Not atomic, or a system call."""


class Step(NamedTuple):
    """One access. ``place``: a word, ``header`` or ``payload``; empty for a fence."""

    name: str
    do: Do
    place: str = ""
    order: Order = Order.NONE


NATIVE: dict[str, tuple[Step, ...]] = {
    # Until there is credit for a chunk: load, and if there is none the rest, again.
    "producer.wait": (
        Step("producer.credit", Do.LOAD, "tail", Order.ACQUIRE),
        Step("producer.flag", Do.STORE, "producer_waits", Order.RELAXED),
        Step("producer.flag_fence", Do.FENCE, order=Order.SEQ_CST),
        Step("producer.sleep", Do.SLEEP, "tail"),
        Step("producer.unflag", Do.STORE, "producer_waits", Order.RELAXED),
    ),
    "producer.chunk": (
        Step("producer.header", Do.WRITE, "header"),
        Step("producer.payload", Do.WRITE, "payload"),
        Step("producer.publish", Do.STORE, "head", Order.RELEASE),
        Step("producer.publish_fence", Do.FENCE, order=Order.SEQ_CST),
        Step("producer.asleep", Do.LOAD, "consumer_waits", Order.RELAXED),
        Step("producer.wake", Do.WAKE, "head"),
    ),
    "consumer.wait": (
        Step("consumer.message", Do.LOAD, "head", Order.ACQUIRE),
        Step("consumer.flag", Do.STORE, "consumer_waits", Order.RELAXED),
        Step("consumer.flag_fence", Do.FENCE, order=Order.SEQ_CST),
        Step("consumer.sleep", Do.SLEEP, "head"),
        Step("consumer.unflag", Do.STORE, "consumer_waits", Order.RELAXED),
    ),
    "consumer.chunk": (
        Step("consumer.header", Do.READ, "header"),
        Step("consumer.payload", Do.READ, "payload"),
        Step("consumer.credit", Do.STORE, "tail", Order.RELEASE),
        Step("consumer.credit_fence", Do.FENCE, order=Order.SEQ_CST),
        Step("consumer.asleep", Do.LOAD, "producer_waits", Order.RELAXED),
        Step("consumer.wake", Do.WAKE, "tail"),
    ),
}
"""Of the C helper. A sleeper raises its flag before it sleeps, so that the other end calls the kernel only
when somebody sleeps; the two fences make it impossible that both miss each other."""


def _plain(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    kept = [step for step in steps if step.do is not Do.FENCE and not step.name.endswith(".asleep")]
    strong = {Do.LOAD: Order.ACQUIRE, Do.STORE: Order.RELEASE}
    return tuple(step._replace(order=strong.get(step.do, step.order)) for step in kept)


PLAIN: dict[str, tuple[Step, ...]] = {name: _plain(steps) for name, steps in NATIVE.items()}
"""Without the helper: there are no fences, so a publisher always wakes. Every load of x86-64 is an acquire
and every store a release."""
