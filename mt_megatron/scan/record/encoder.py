"""Events -> packed spans. Runs in the background: what a training thread hears, it only queues."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from mt_megatron.scan.format.names import Names
from mt_megatron.scan.format.records import ASYNC, KIND, OPEN, SPAN, WAIT
from mt_megatron.seams.events import Moment, Span

Event = Span | Moment
"""What is queued. A moment may also be a ``STEP_ENDED`` or ``FORGET``."""

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
    "layer": "number",
    "pause": "op",
}
_FLAGS = {None: 0, False: 0, True: ASYNC, "start": ASYNC, "wait": WAIT}
_MOST_OPEN = 256
_MOST_UNENDED = 4_096
_MOST_THREADS = 255
_MOST_KNOWN = 10_000
# Of these, what goes on beside the step in other threads is no part of a micro-batch.
_WITHOUT_MICROBATCH = frozenset({"step", "optimizer", "checkpoint", "pause"})

_Begun = tuple[int, str, Mapping[str, Any], int, int, int]
"""Time, name, attributes, iteration, micro-batch, chunk."""

_Ended = tuple[int, _Begun, Mapping[str, Any], int]
"""End, beginning, all attributes, thread."""


class SpanEncoder:
    """Packs ``records.SPAN`` out of spans and of begins and ends, paired per thread; used by one thread."""

    def __init__(self, names: Names) -> None:
        self.out = bytearray()
        """Spans packed so far, in the order of their ends; the caller takes and clears them."""
        self.iteration = 0
        """The step of the last event; 0 before the first."""
        self.threads: dict[int, int] = {}
        """Thread identity -> its number in the spans."""
        self.unmatched = 0
        """Ends without a begin, and begins that were given up."""
        self.unreadable = 0
        """Events whose attributes no record can hold."""
        self._names = names
        self._open: dict[int, list[_Begun]] = {}
        self._unended: list[tuple[Span, _Begun]] = []
        self._ended: list[_Ended] = []
        self._written_open: set[tuple[int, int, str]] = set()
        self._microbatch, self._chunk = -1, -1
        self._within: Span | None = None
        self._step_began: int | None = None
        self._known: dict[tuple[str, Any, Any], tuple[int, int]] = {}

    def feed(self, events: Iterable[Event]) -> None:
        """Take events in the order in which they were heard."""
        ended = self._ended
        unended = self._unended
        for each in events:
            if isinstance(each, tuple):
                self._moment(*each)
                continue
            name, attrs, begun = each.name, each.attrs, each.begun
            if self._within is not None and 0 < self._within.ended <= begun:
                self._leave_microbatch()
            if name == "microbatch":
                self._within = each
            beginning = self._begin(begun, name, attrs)
            if each.ended:
                ended.append((each.ended, beginning, attrs, each.thread))
            else:
                unended.append((each, beginning))
        if unended:
            # The outer ones come first: when one is seen to have ended, so are those within.
            self._unended = still = []
            for pair in unended:
                span, beginning = pair
                if span.ended:
                    ended.append((span.ended, beginning, span.attrs, span.thread))
                    if self._written_open:
                        self._written_open.discard((span.thread, span.begun, span.name))
                else:
                    still.append(pair)
            if len(still) > _MOST_UNENDED:
                # An end that never comes must not pile up.
                self.unmatched += len(still) - _MOST_UNENDED
                del still[: len(still) - _MOST_UNENDED]
        ended.sort(key=itemgetter(0))
        for end, beginning, attrs, ident in ended:
            self._pack(beginning, end, attrs, ident)
        ended.clear()

    def open_spans(self, now: int, *, at_least: int = OPEN_AFTER_NS) -> None:
        """Pack what has been open for ``at_least`` nanoseconds at ``now`` and was not packed yet."""
        for ident, stack in self._open.items():
            for begun in stack:
                self._pack_open(begun, ident, now - at_least)
        for span, begun in self._unended:
            self._pack_open(begun, span.thread, now - at_least)

    def pause(self, name: str, begin: int, end: int, ident: int) -> None:
        """Pack a span of kind ``pause``."""
        begun: _Begun = (begin, "pause", {}, self.iteration, -1, -1)
        self._write(begun, end, {}, ident, self._names.string(name), KIND["pause"])

    def number(self, ident: int) -> int:
        """The number of a thread in the spans; the last one stands for all beyond 255."""
        return self.threads.setdefault(ident, min(len(self.threads), _MOST_THREADS))

    def _moment(self, time: int, ident: int, phase: str, name: str, attrs: Mapping[str, Any]) -> None:
        stack = self._open.get(ident)
        if stack is None:
            stack = self._open[ident] = []
        if phase == "begin":
            if self._within is not None and 0 < self._within.ended <= time:
                self._leave_microbatch()
            if name == "step":
                self.iteration = _small(attrs.get("iteration", self.iteration + 1))
                self._leave_microbatch()
            if len(stack) >= _MOST_OPEN:
                self.unmatched += 1
                del stack[0]
            stack.append(self._begin(time, name, attrs))
        elif phase == "end":
            # Whatever is asynchronous may end in another order than it began.
            for index in range(len(stack) - 1, -1, -1):
                if stack[index][1] == name:
                    self._end(stack.pop(index), time, attrs, ident)
                    break
            else:
                self.unmatched += 1
        elif phase == STEP_ENDED:
            begin = time if self._step_began is None else self._step_began
            self._ended.append((time, (begin, "step", {}, self.iteration, -1, -1), {}, ident))
            self.iteration += 1
            self._step_began = time
        else:
            self._open.clear()
            self._written_open.clear()

    def _begin(self, time: int, name: str, attrs: Mapping[str, Any]) -> _Begun:
        if self._step_began is None:
            self._step_began = time
        if name == "microbatch":
            self._microbatch, self._chunk = attrs.get("microbatch", -1), attrs.get("chunk", -1)
        if name in _WITHOUT_MICROBATCH:
            return time, name, attrs, self.iteration, -1, -1
        microbatch = attrs.get("microbatch", self._microbatch)
        return time, name, attrs, self.iteration, microbatch, attrs.get("chunk", self._chunk)

    def _end(self, begun: _Begun, time: int, learnt: Mapping[str, Any], ident: int) -> None:
        if self._written_open:
            self._written_open.discard((ident, begun[0], begun[1]))
        self._ended.append((time, begun, {**begun[2], **learnt} if learnt else begun[2], ident))
        if begun[1] in ("step", "microbatch"):
            self._leave_microbatch()

    def _leave_microbatch(self) -> None:
        self._microbatch = self._chunk = -1
        self._within = None

    def _pack_open(self, begun: _Begun, ident: int, before: int) -> None:
        key = (ident, begun[0], begun[1])
        if begun[0] <= before and key not in self._written_open:
            self._written_open.add(key)
            self._pack(begun, OPEN, begun[2], ident)

    def _pack(self, begun: _Begun, end: int, attrs: Mapping[str, Any], ident: int) -> None:
        name = begun[1]
        try:
            if name == "p2p" and "transfers" in attrs:
                for op, peer, seq, size in attrs["transfers"]:
                    one = {**attrs, "peer": peer, "seq": seq, "bytes": size}
                    self._write(begun, end, one, ident, self._names.string(op), KIND["p2p"])
                return
            said = attrs.get(_NAMED_BY.get(name, ""))
            key = (name, said, attrs.get("direction") if name == "module" else None)
            text, kind = self._known.get(key) or self._know(key)
            self._write(begun, end, attrs, ident, text, kind)
        except (struct.error, TypeError, ValueError):
            self.unreadable += 1

    def _know(self, key: tuple[str, Any, Any]) -> tuple[int, int]:
        """The number of the string that stands for such an event, and the number of its kind."""
        name, said, direction = key
        if name == "layer":
            text = f"layers.{said}"
        elif direction == "backward":
            text = f"{said} backward"
        else:
            text = said or name
        found = self._names.string(text), KIND.get(name, 0)
        if len(self._known) < _MOST_KNOWN:
            self._known[key] = found
        return found

    def _write(
        self, begun: _Begun, end: int, attrs: Mapping[str, Any], ident: int, text: int, kind: int
    ) -> None:
        begin, _, _, iteration, microbatch, chunk = begun
        get = attrs.get
        group = get("group")
        thread = self.threads.get(ident)
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
            kind,
            self.number(ident) if thread is None else thread,
            _FLAGS.get(get("asynchronous"), 0),
        )
        device = get("device")
        # Else ``device_spans`` writes it once the device has done what it was asked for.
        if device is None or end == OPEN or not device.hold(packed):
            self.out += packed


def thread_names(threads: Mapping[int, int]) -> dict[str, str]:
    """Number -> name of the living ones of ``threads`` (identity -> number), for a note."""
    living = {thread.ident: thread.name for thread in threading.enumerate()}
    return {str(number): living.get(ident, "a thread not of Python") for ident, number in threads.items()}


def _micro(value: Any) -> int:
    return -1 if value is None or not -1 <= value <= 32_767 else value


def _small(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**31 else 0
