"""Progress of the step under way: micro-batch, chunk, and whether a forward pass is a recomputed one.

Micro-batches come from the events ``forward`` and ``backward``, which upstream's schedules and ours emit, and
are followed while a tap is open. Upstream does not say whose backward runs; it is counted, since the
micro-batches of a chunk keep their order in every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any

import torch

from mt_megatron.seams import events

UNKNOWN = -1
"""Micro-batch, chunk or ordinal where no schedule has said it."""


def is_recomputing() -> bool:
    """Whether a forward pass that runs now is within backward: activation recomputation, of either of
    torch's kinds or Megatron's."""
    return torch._C._current_graph_task_id() != -1


def current_microbatch() -> int:
    """Number of the micro-batch whose forward or backward runs, from 0 within the step and chunk.

    -1 outside of a schedule, while no tap is open, and in backward where the step's beginning was missed.
    """
    return _now.microbatch


def current_chunk() -> int:
    """Number of the model chunk within this pipeline stage whose forward or backward runs; -1 as for
    ``current_microbatch``."""
    return _now.chunk


class _Microbatch:
    """One micro-batch of one chunk from its forward to its backward."""

    __slots__ = ("again", "calls", "chunk", "microbatch")

    def __init__(self, microbatch: int, chunk: int) -> None:
        self.microbatch = microbatch
        self.chunk = chunk
        self.calls: dict[Any, int] = {}
        """How often what (by identity) was called in forward, and ``again`` in recomputation."""

        self.again: dict[Any, int] = {}


_NOTHING = _Microbatch(UNKNOWN, UNKNOWN)
_now = _NOTHING
_under_way: dict[tuple[int, int], _Microbatch] = {}
"""By chunk and micro-batch, since the chunk's micro-batch 0 began."""

_followers = 0
_stop: Callable[[], None] | None = None
_following = RLock()


def follow() -> Callable[[], None]:
    """Keep ``current_microbatch`` known until the returned function is called."""
    global _followers, _stop
    with _following:
        _followers += 1
        if _stop is None:
            _stop = events.subscribe(_hear, {"forward", "backward"})
    active = [True]

    def leave() -> None:
        global _followers, _stop, _now
        with _following:
            if not active:
                return
            active.clear()
            _followers -= 1
            if _followers == 0 and _stop is not None:
                _stop()
                _stop, _now = None, _NOTHING
                _under_way.clear()

    return leave


def ordinal(tap: Any, recomputing: bool) -> int:
    """How many calls of ``tap`` came before this one in the micro-batch, which counts as one of them.

    A recomputed call has the number of the call that it repeats: backward goes through the calls from the
    last to the first.
    """
    now = _now
    if now is _NOTHING:
        return UNKNOWN
    if not recomputing:
        number = now.calls.get(tap, 0)
        now.calls[tap] = number + 1
        return number
    repeated = now.again.get(tap, 0)
    now.again[tap] = repeated + 1
    return max(now.calls.get(tap, 1) - 1 - repeated, 0)


def _hear(phase: events.Phase, name: events.EventName, attrs: Mapping[str, Any]) -> None:
    global _now
    if phase == "end":
        _now = _NOTHING
        return
    microbatch, chunk = attrs.get("microbatch", UNKNOWN), attrs.get("chunk", UNKNOWN)
    if microbatch < 0:
        _now = _NOTHING
        return
    if name == "forward":
        if microbatch == 0:
            for known in [each for each in _under_way if each[0] == chunk]:
                del _under_way[known]
        _now = _under_way[chunk, microbatch] = _Microbatch(microbatch, chunk)
    else:
        # Without the step's micro-batch 0 the count of the backward passes may be off: not known.
        heard_all = (chunk, 0) in _under_way
        _now = _under_way.get((chunk, microbatch), _NOTHING) if heard_all else _NOTHING
