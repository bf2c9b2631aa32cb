"""Collectives hop by hop: when each member leaves, given when each came and what each link takes.

Times are float64 nanoseconds; the last axis is the members in the group's order, all others are
groups. A message from member i needs ``gap`` to leave i (bytes over bandwidth) and ``latency`` more to be
there; nothing moves before the receiver has come. That is all: waiting, and who leaves when, follow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Hold = Callable[[Times], Times]
"""Moves times at which a member's process stands still to when it goes on."""


@cache
def _moved(size: int, step: int) -> NDArray[np.int64]:
    return (np.arange(size) - step) % size


def _rolled(values: Times, step: int) -> Times:
    """``np.roll`` of the last axis, several times as fast for small arrays."""
    return values.take(_moved(values.shape[-1], step), axis=-1)


def ring(enter: Times, gap: Times, latency: Times, hops: int, hold: Hold | None = None) -> Times:
    """When each member leaves a ring of ``hops`` hops; ``gap`` and ``latency`` are those of i -> i + 1.

    An all-reduce of n members has 2 (n - 1) hops, a reduce-scatter or all-gather n - 1, each with the
    n-th part of the bytes.
    """
    received = sent = enter
    there = _rolled(enter, -1)
    for _ in range(hops):
        # What i passes on it must have received; its port must be free; the next one must have come.
        sent = np.maximum(np.maximum(received, sent), there) + gap
        arrived = _rolled(sent + latency, 1)
        if hold is not None:
            sent, arrived = hold(sent), hold(arrived)
        received = np.maximum(received, arrived)
    return np.maximum(received, sent)


def doubling(enter: Times, latency: Times, hold: Hold | None = None) -> Times:
    """When each member leaves an all-reduce of a few bytes: log2(n) rounds, each with one farther away.

    ``latency`` [..., rounds, n] is that of i -> i + 2^round.
    """
    at = enter
    for index in range(latency.shape[-2]):
        step = 1 << index
        at = np.maximum(at, _rolled(at + latency[..., index, :], step))
        if hold is not None:
            at = hold(at)
    return at


def all_to_all(enter: Times, gap: Times, latency: Times, extra: Times, hold: Hold | None = None) -> Times:
    """When each member leaves an exchange of every pair.

    A sender's port takes one message after another, ``gap`` each. What the way to one receiver takes longer
    (``latency``, and ``extra`` where it is slower than the port) keeps that message and both its ends,
    not the sender's other messages. All three [..., rounds, n] are those of i -> i + round + 1.
    """
    size = enter.shape[-1]
    free = leave = enter
    for step in range(1, size):
        sent = np.maximum(free, _rolled(enter, -step)) + gap[..., step - 1, :]
        drained = sent + extra[..., step - 1, :]
        arrived = _rolled(drained + latency[..., step - 1, :], step)
        if hold is not None:
            sent, drained, arrived = hold(sent), hold(drained), hold(arrived)
        free, leave = sent, np.maximum(np.maximum(leave, drained), arrived)
    return leave


def transfer(
    posted: Times,
    other: Times,
    gap: Times,
    latency: Times,
    hold_sender: Hold | None = None,
    hold_receiver: Hold | None = None,
) -> tuple[Times, Times]:
    """When sender and receiver of one message leave, once both have come at ``posted`` and ``other``."""
    left = np.maximum(posted, other) + gap
    left = left if hold_sender is None else hold_sender(left)
    arrived = left + latency
    return left, arrived if hold_receiver is None else hold_receiver(arrived)
