"""Named begin and end points of a training step, free when nobody listens.

    with events.span("layer", number=3):
        ...
    stop = events.subscribe(lambda phase, name, attrs: print(phase, name, attrs))

A listener takes its own timestamps: what "now" means (host clock, device event) is its business.
It runs inside the step, in whatever thread the point is reached (autograd has threads of its
own), and what it raises, the step raises. One that subscribes in the middle of a step may see an
end whose begin it missed; one that hears of an operation that failed may miss its end.

Whoever only keeps what happened takes ``record`` instead: a span then costs it one ``append`` and two
readings of the clock, in no function of its own.

Attributes of ``begin``; those of ``end`` are what was learnt meanwhile, and it may have none:

==============  ==========================================================================================
step            ``iteration``, from 1
data            end: ``work``, the tokens of this rank's micro-batch
microbatch      ``direction`` (``forward``, ``backward``), ``microbatch`` and ``chunk``; inside it:
forward         ``microbatch``, ``chunk``
backward        ``microbatch``, ``chunk``; the micro-batch is counted, as upstream does not know it here.
                Weight gradients that a pipeline schedule defers are a second one
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
pause           ``op``: ``commanded``; the run stands still between two steps because somebody told it to
==============  ==========================================================================================

``microbatch`` counts from 0 within a step, ``chunk`` within the stage; they hold for everything until
the ``microbatch`` ends, and -1 stands for one that is not known.
``group`` is a name (``tp``, ``pp``, ``cp``, ``ep``, ``dp``, ``dp-cp``, ``edp``, ``tp-ep``, ``tp-pp``,
``embedding``, ``world`` ...) and ``ranks`` its members' global ranks in the group's order, for one name
and membership always the same tuple: ``id(ranks)`` is a key for the group.
``seq`` numbers the collectives of such a group from 0 on, from the first that this process heard
somebody listen to, or from ``collectives.restart_numbers``; equal on all members when they listen from the
same point.
``bytes`` is what this rank gives into the collective or transfer (for a gather its own part).
``asynchronous`` is ``start`` where the operation goes on in the background after the end, and
``wait`` where it is waited for, with the same ``seq``; without it the operation is over at the end.
``transfers`` holds ``(op, peer, seq, bytes)`` for each direction: ``send`` or ``recv``, the other
side's global rank, the number of the transfer on that directed edge, bytes (-1 where not known).
``peer`` is the rank that this step of a ring receives from.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from threading import Lock, get_ident
from types import MappingProxyType, TracebackType
from typing import Any, Literal, NamedTuple

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
    "pause",
    "step",
]
"""What can begin and end. ``microbatch`` is one micro-batch's stay at this stage in one
``direction``, with whatever its schedule does around the ``forward`` or ``backward`` inside."""

Phase = Literal["begin", "end"]
Listener = Callable[[Phase, EventName, Mapping[str, Any]], None]

Moment = tuple[int, int, str, str, Mapping[str, Any]]
"""Time (``time.perf_counter_ns``), thread, ``begin`` or ``end``, name, attributes."""

_now = time.perf_counter_ns
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Span:
    """One event from begin to end, as ``span`` makes it; times by ``time.perf_counter_ns``."""

    __slots__ = ("attrs", "begun", "ended", "name", "thread")

    attrs: Mapping[str, Any]
    begun: int
    ended: int
    """0 until it has ended."""

    name: EventName
    thread: int

    # No ``__init__``: its call would cost as much as all five assignments.


class _Told(Span):
    """Listeners hear of it, nobody records it."""

    __slots__ = ()

    def __enter__(self) -> None:
        for listener in _about(self.name)[2]:
            listener("begin", self.name, self.attrs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for listener in _about(self.name)[2]:
            listener("end", self.name, _NOTHING)


class _Recorded(Span):
    """It is recorded, no listener hears of it."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended = _now()


class _Both(_Told):
    """It is recorded first: what a listener does then happens within it."""

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended = _now()
        super().__exit__(kind, error, traceback)


class _Idle:
    """What stands for a span while nobody listens."""

    __slots__ = ()

    # ``contextlib.nullcontext`` takes longer: it looks up what it returns, and packs what it is given.
    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class _Subscribed(NamedTuple):
    call: Callable[..., None]
    names: frozenset[str] | None
    """None: all."""

    records: bool


_About = tuple[type[Span] | None, Callable[..., None], tuple[Callable[..., None], ...]]
"""Of a name: the class of its spans (None where nobody listens), who records it, who else hears of it."""

# Replaced, never changed in place: emitting reads each once and needs no lock.
_subscribed: tuple[_Subscribed, ...] = ()
# Those names that were asked for since somebody came or went.
_known: dict[str, _About] = {}
_nowhere: Callable[..., None] = deque[Any](maxlen=0).append
_subscribing = Lock()
IDLE: AbstractContextManager[None] = _Idle()
"""Does nothing; may be entered again and again, by several threads at once."""


def listening() -> bool:
    """Whether anybody listens. Ask before computing an attribute that costs something."""
    return bool(_subscribed)


def heard(name: EventName) -> bool:
    """Whether anybody wants to hear of what is called ``name``. Ask before working out its attributes."""
    if not _subscribed:
        return False
    try:
        kind, _, _ = _known[name]
    except KeyError:
        kind, _, _ = _about(name)
    return kind is not None


def begin(name: EventName, **attrs: Any) -> None:
    """Say that ``name`` begins. ``attrs`` describe it: ``number=``, ``bytes=``, ``microbatch=`` ..."""
    # None of the four calls another or a common one: a call takes a third of the time of all this.
    if _subscribed:
        try:
            _, append, listeners = _known[name]
        except KeyError:
            _, append, listeners = _about(name)
        append((_now(), get_ident(), "begin", name, attrs))
        for listener in listeners:
            listener("begin", name, attrs)


def end(name: EventName, **attrs: Any) -> None:
    """Say that the innermost ``name`` of this thread ends. ``attrs`` are what was learnt meanwhile."""
    if _subscribed:
        try:
            _, append, listeners = _known[name]
        except KeyError:
            _, append, listeners = _about(name)
        append((_now(), get_ident(), "end", name, attrs))
        for listener in listeners:
            listener("end", name, attrs)


def span(name: EventName, **attrs: Any) -> AbstractContextManager[None]:
    """``begin`` here and ``end`` on exit, also when the body raises: to be made where it is entered."""
    if not _subscribed:
        return IDLE
    try:
        kind, append, _ = _known[name]
    except KeyError:
        kind, append, _ = _about(name)
    if kind is None:
        return IDLE
    made = kind()
    made.name = name
    made.attrs = attrs
    made.ended = 0
    made.thread = get_ident()
    made.begun = _now()
    append(made)
    return made  # type: ignore[return-value]


def described(name: EventName, attrs: dict[str, Any]) -> AbstractContextManager[None]:
    """The same with attributes in a dict, which belongs to the event from here on."""
    if not _subscribed:
        return IDLE
    try:
        kind, append, _ = _known[name]
    except KeyError:
        kind, append, _ = _about(name)
    if kind is None:
        return IDLE
    made = kind()
    made.name = name
    made.attrs = attrs
    made.ended = 0
    made.thread = get_ident()
    made.begun = _now()
    append(made)
    return made  # type: ignore[return-value]


def subscribe(listener: Listener, names: Collection[EventName] | None = None) -> Callable[[], None]:
    """Call ``listener(phase, name, attrs)`` at every point, or at those of ``names``, until the returned
    function is called."""
    return _add(_Subscribed(listener, None if names is None else frozenset(names), False))


def record(append: Callable[[Span | Moment], None], names: Collection[EventName]) -> Callable[[], None]:
    """Give ``append`` all that is called one of ``names``, until the returned function is called: a
    ``Span`` when it begins (it is told its end later), a ``Moment`` for each ``begin`` and ``end``.

    ``append`` should be that of a list or a deque, and must not raise.
    """
    return _add(_Subscribed(append, frozenset(names), True))


def _add(one: _Subscribed) -> Callable[[], None]:
    with _subscribing:
        _arrange((*_subscribed, one))
    active = [one]

    def remove() -> None:
        with _subscribing:
            if active:
                active.clear()
                index = next(i for i, other in enumerate(_subscribed) if other is one)
                _arrange(_subscribed[:index] + _subscribed[index + 1 :])

    return remove


def _arrange(subscribed: tuple[_Subscribed, ...]) -> None:
    global _subscribed, _known
    # In this order: who finds the new dict puts into it what the new ones want.
    _subscribed = subscribed
    _known = {}


def _about(name: str) -> _About:
    """Of ``name``, worked out where nobody has asked since somebody came or went."""
    known, subscribed = _known, _subscribed
    if name not in known:
        records, hears = (
            tuple(
                each.call
                for each in subscribed
                if each.records == whether and (each.names is None or name in each.names)
            )
            for whether in (True, False)
        )
        kind: type[Span] | None = None
        if records:
            kind = _Both if hears else _Recorded
        elif hears:
            kind = _Told
        known[name] = kind, _one(records), hears
    return known[name]


def _one(calls: tuple[Callable[..., None], ...]) -> Callable[..., None]:
    """A single function that does what all of them do: there is hardly ever more than one."""
    if len(calls) < 2:
        return calls[0] if calls else _nowhere

    def every(item: Any) -> None:
        for call in calls:
            call(item)

    return every


def _renew_lock() -> None:
    """A child may have been forked while another thread, which it does not have, held the lock."""
    global _subscribing
    _subscribing = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
