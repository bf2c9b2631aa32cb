"""Begin and end events -> spans. Runs in the background: what a training thread hears, it only queues."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from mt_megatron.scan.names import Names
from mt_megatron.scan.records import ASYNC, KIND, OPEN, SPAN, WAIT

Event = tuple[int, int, str, str, Mapping[str, Any]]
"""Time, thread, ``begin`` or ``end`` (or ``STEP_ENDED``, ``FORGET``), name, attributes."""

STEP_ENDED = "step ended"
"""Instead of ``begin`` or ``end``: a step is over in a program that announces none."""

FORGET = "forget"
"""Instead of ``begin`` or ``end``: the ends of what is open now will not be heard."""

OPEN_AFTER_NS = 1_000_000_000

_PACK = struct.Struct("<6q3i2H2h2BH").pack
assert struct.calcsize("<6q3i2H2h2BH") == SPAN.itemsize

_NAMED_BY = {
    "collective": "op",
    "module": "module",
    "optimizer": "optimizer",
    "checkpoint": "op",
    "microbatch": "direction",
}
_FLAGS = {None: 0, False: 0, True: ASYNC, "start": ASYNC, "wait": WAIT}
_MOST_OPEN = 256
_MOST_THREADS = 255
# Of these, what goes on beside the step in other threads is no part of a micro-batch.
_WITHOUT_MICROBATCH = frozenset({"step", "optimizer", "checkpoint"})

_Begun = tuple[int, str, Mapping[str, Any], int, int, int]
"""Time, name, attributes, iteration, micro-batch, chunk."""


class SpanEncoder:
    """Pairs events per thread and packs ``records.SPAN``; used by one thread."""

    def __init__(self, names: Names) -> None:
        self.out = bytearray()
        """Spans packed so far; the caller takes and clears them."""
        self.iteration = 0
        """The step of the last event; 0 before the first."""
        self.ended_steps: list[int] = []
        """Steps that ended; the caller takes and clears them."""
        self.threads: dict[int, int] = {}
        """Thread identity -> its number in the spans."""
        self.unmatched = 0
        """Ends without a begin, and begins that were given up."""
        self.unreadable = 0
        """Events whose attributes no record can hold."""
        self._names = names
        self._open: dict[int, list[_Begun]] = {}
        self._written_open: set[tuple[int, int, str]] = set()
        self._microbatch, self._chunk = -1, -1
        self._step_began: int | None = None
        self._layers: dict[Any, int] = {}

    def feed(self, events: Iterable[Event]) -> None:
        """Take events in the order in which they were heard."""
        for time, ident, phase, name, attrs in events:
            stack = self._open.get(ident)
            if stack is None:
                stack = self._open[ident] = []
                if ident:
                    self.number(ident)
            if phase == "begin":
                self._begin(stack, time, name, attrs)
            elif phase == "end":
                # Whatever is asynchronous may end in another order than it began.
                for index in range(len(stack) - 1, -1, -1):
                    if stack[index][1] == name:
                        self._end(stack.pop(index), time, attrs, ident)
                        break
                else:
                    self.unmatched += 1
            elif phase == STEP_ENDED:
                self._step_ended(time, ident)
            else:
                self._open.clear()
                self._written_open.clear()

    def open_spans(self, now: int, *, at_least: int = OPEN_AFTER_NS) -> None:
        """Pack what has been open for ``at_least`` nanoseconds at ``now`` and was not packed yet."""
        for ident, stack in self._open.items():
            for begun in stack:
                key = (ident, begun[0], begun[1])
                if now - begun[0] >= at_least and key not in self._written_open:
                    self._written_open.add(key)
                    self._pack(begun, OPEN, begun[2], ident)

    def pause(self, name: str, begin: int, end: int, ident: int) -> None:
        """Pack a span of kind ``pause``."""
        self.number(ident)
        self._write((begin, "pause", {}, self.iteration, -1, -1), end, {}, ident, self._names.string(name))

    def _begin(self, stack: list[_Begun], time: int, name: str, attrs: Mapping[str, Any]) -> None:
        if name == "step":
            self.iteration = _small(attrs.get("iteration", self.iteration + 1))
            self._microbatch = self._chunk = -1
        elif name == "microbatch":
            self._microbatch, self._chunk = attrs.get("microbatch", -1), attrs.get("chunk", -1)
        if self._step_began is None:
            self._step_began = time
        if len(stack) >= _MOST_OPEN:
            # An end that never comes must not pile up.
            self.unmatched += 1
            del stack[0]
        if name in _WITHOUT_MICROBATCH:
            stack.append((time, name, attrs, self.iteration, -1, -1))
        else:
            microbatch = attrs.get("microbatch", self._microbatch)
            stack.append((time, name, attrs, self.iteration, microbatch, attrs.get("chunk", self._chunk)))

    def _end(self, begun: _Begun, time: int, learnt: Mapping[str, Any], ident: int) -> None:
        name = begun[1]
        if self._written_open:
            self._written_open.discard((ident, begun[0], name))
        self._pack(begun, time, {**begun[2], **learnt} if learnt else begun[2], ident)
        if name == "step":
            self.ended_steps.append(begun[3])
            self._microbatch = self._chunk = -1
        elif name == "microbatch":
            self._microbatch = self._chunk = -1

    def _step_ended(self, time: int, ident: int) -> None:
        begin = time if self._step_began is None else self._step_began
        self._pack((begin, "step", {}, self.iteration, -1, -1), time, {}, ident)
        self.ended_steps.append(self.iteration)
        self.iteration += 1
        self._step_began = time

    def _pack(self, begun: _Begun, end: int, attrs: Mapping[str, Any], ident: int) -> None:
        name = begun[1]
        try:
            if name == "p2p" and "transfers" in attrs:
                for op, peer, seq, size in attrs["transfers"]:
                    one = {**attrs, "peer": peer, "seq": seq, "bytes": size}
                    self._write(begun, end, one, ident, self._names.string(op))
                return
            if name == "layer":
                number = attrs.get("number")
                text = self._layers.get(number)
                if text is None:
                    text = self._layers[number] = self._names.string(f"layers.{number}")
            else:
                key = _NAMED_BY.get(name)
                said = attrs.get(key) if key else None
                if name == "module" and attrs.get("direction") == "backward":
                    said = f"{said} backward"
                text = self._names.string(said or name)
            self._write(begun, end, attrs, ident, text)
        except (struct.error, TypeError, ValueError):
            self.unreadable += 1

    def _write(self, begun: _Begun, end: int, attrs: Mapping[str, Any], ident: int, text: int) -> None:
        begin, name, _, iteration, microbatch, chunk = begun
        get = attrs.get
        group = get("group")
        packed = _PACK(
            begin,
            end,
            0,
            0,
            get("bytes", -1),
            get("work", 0),
            iteration,
            get("seq", -1),
            get("peer", -1),
            text,
            0 if group is None else self._names.group(group, get("ranks")),
            _micro(microbatch),
            _micro(chunk),
            KIND.get(name, 0),
            self.threads[ident],
            _FLAGS.get(get("asynchronous"), 0),
        )
        device = get("device")
        # Else ``device_time`` writes it once the device has done what it was asked for.
        if device is None or end == OPEN or not device.hold(packed):
            self.out += packed

    def number(self, ident: int) -> int:
        """The number of a thread in the spans; the last one stands for all beyond 255."""
        return self.threads.setdefault(ident, min(len(self.threads), _MOST_THREADS))


def thread_names(threads: Mapping[int, int]) -> dict[str, str]:
    """Number -> name of the living ones of ``threads`` (identity -> number), for a note."""
    living = {thread.ident: thread.name for thread in threading.enumerate()}
    return {str(number): living.get(ident, "a thread not of Python") for ident, number in threads.items()}


def _micro(value: Any) -> int:
    return -1 if value is None or not -1 <= value <= 32_767 else value


def _small(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**31 else 0
