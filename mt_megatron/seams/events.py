"""Named begin and end points of a training step, free when nobody listens.

    with events.span("layer", number=3):
        ...
    stop = events.subscribe(lambda phase, name, attrs: print(phase, name, attrs))

A listener takes its own timestamps: what "now" means (host clock, device event) is its business.
It runs inside the step, in whatever thread the point is reached (autograd has threads of its
own), and what it raises, the step raises. One that subscribes in the middle of a step may see an
end whose begin it missed; one that hears of an operation that failed may miss its end.

Attributes of ``begin``; those of ``end`` are what was learnt meanwhile, and it may have none:

==============  ==========================================================================================
step            ``iteration``, from 1
data            end: ``work``, the tokens of this rank's micro-batch
microbatch      ``direction`` (``forward``, ``backward``), ``microbatch`` and ``chunk``; inside it:
forward         ``microbatch``, ``chunk``
backward        ``microbatch``, ``chunk``; the micro-batch is counted, as upstream does not know it here
layer           ``number``, from 1 over the whole pipeline; forward and its recomputation
module          ``module``, its path below the chunk (``decoder.layers.0.mlp``), ``direction``, ``number`` of
                the layer; for experts ``work``, the rows this rank's experts get
collective      ``op``, ``group``, ``ranks``, ``seq``, ``bytes``, maybe ``asynchronous`` and ``peer``
p2p             ``group``, ``ranks``, ``bytes``, ``transfers``, maybe ``asynchronous``; and ``send_next``,
                ``send_prev``, ``recv_prev``, ``recv_next`` as upstream puts it
optimizer       ``optimizer``, the class
checkpoint      ``iteration``; none of ``op`` while training stands still for one, else ``op``: ``write``
                (within it or in a thread in the background; end: ``bytes``), ``collect``, ``finish``
                (waiting for the files, this rank's and the others')
==============  ==========================================================================================

``microbatch`` counts from 0 within a step, ``chunk`` within the stage; they hold for everything until
the ``microbatch`` ends, and -1 stands for one that is not known.
``group`` is a name (``tp``, ``pp``, ``cp``, ``ep``, ``dp``, ``dp-cp``, ``edp``, ``tp-ep``, ``tp-pp``,
``embedding``, ``world`` ...) and ``ranks`` its members' global ranks in the group's order, for one name
and membership always the same tuple: ``id(ranks)`` is a key for the group.
``seq`` numbers the collectives of such a group from 0 on, from the first that this process heard
somebody listen to; equal on all members when they listen from the same point.
``bytes`` is what this rank gives into the collective or transfer (for a gather its own part).
``asynchronous`` is ``start`` where the operation goes on in the background after the end, and
``wait`` where it is waited for, with the same ``seq``; without it the operation is over at the end.
``transfers`` holds ``(op, peer, seq, bytes)`` for each direction: ``send`` or ``recv``, the other
side's global rank, the number of the transfer on that directed edge, bytes (-1 where not known).
``peer`` is the rank that this step of a ring receives from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from types import MappingProxyType, TracebackType
from typing import Any, Literal

EventName = Literal[
    "layer",
    "module",
    "collective",
    "p2p",
    "microbatch",
    "forward",
    "backward",
    "optimizer",
    "data",
    "checkpoint",
    "step",
]
"""What can begin and end. ``microbatch`` is one micro-batch's stay at this stage in one
``direction``, with whatever its schedule does around the ``forward`` or ``backward`` inside."""

Phase = Literal["begin", "end"]
Listener = Callable[[Phase, EventName, Mapping[str, Any]], None]

# Replaced, never changed in place: emitting reads it once and needs no lock.
_listeners: tuple[Listener, ...] = ()
_subscribing = Lock()


def listening() -> bool:
    """Whether anybody listens. Ask before computing an attribute that costs something."""
    return bool(_listeners)


def begin(name: EventName, **attrs: Any) -> None:
    """Say that ``name`` begins. ``attrs`` describe it: ``number=``, ``bytes=``, ``microbatch=`` ..."""
    # Here and below no function calls the listeners for all: it would cost as much as some of them.
    if _listeners:
        for listener in _listeners:
            listener("begin", name, attrs)


def end(name: EventName, **attrs: Any) -> None:
    """Say that the innermost ``name`` of this thread ends. ``attrs`` are what was learnt meanwhile."""
    if _listeners:
        for listener in _listeners:
            listener("end", name, attrs)


def span(name: EventName, **attrs: Any) -> AbstractContextManager[None]:
    """``begin`` on entry and ``end`` on exit, also when the body raises."""
    return _Span(name, attrs) if _listeners else _IDLE


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call ``listener(phase, name, attrs)`` at every point until the returned function is called."""
    global _listeners
    with _subscribing:
        _listeners = (*_listeners, listener)
    active = [listener]

    def unsubscribe() -> None:
        global _listeners
        with _subscribing:
            if active:
                active.clear()
                index = next(i for i, other in enumerate(_listeners) if other is listener)
                _listeners = _listeners[:index] + _listeners[index + 1 :]

    return unsubscribe


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class _Span:
    __slots__ = ("_attrs", "_name")

    def __init__(self, name: EventName, attrs: Mapping[str, Any]) -> None:
        self._name: EventName = name
        self._attrs = attrs

    def __enter__(self) -> None:
        for listener in _listeners:
            listener("begin", self._name, self._attrs)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for listener in _listeners:
            listener("end", self._name, _NOTHING)


_IDLE: AbstractContextManager[None] = nullcontext()


def _renew_lock() -> None:
    """A child may have been forked while another thread, which it does not have, held the lock."""
    global _subscribing
    _subscribing = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
