"""A trace as Perfetto's own protobuf (``.pftrace``): smaller than Chrome JSON, and ns are kept.

Field numbers are those of perfetto's ``protos/perfetto/trace`` (``trace_packet.proto``,
``track_event/*.proto``, ``interned_data.proto``).

The wire format of protocol buffers (varints, 64-bit words, length-prefixed bytes) follows the encoding
specification at protobuf.dev, as far as it is needed here.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from mt_megatron.scan.analysis.trace import Trace
from mt_megatron.scan.findings.text import headline
from mt_megatron.scan.format.records import KINDS
from mt_megatron.scan.format.run_files import whole_file

from .chrome import FINDINGS_TITLE, Arrow, arrow_number, arrows_of, finding_bars, findings_process
from .export_index import Survey, survey
from .output_file import Exported, rank_title
from .rank_stream import EVERYTHING, Piece, Selection, pieces
from .tracks import Lanes, Plotted, counter_points, labels, slices, step_thread, track_name

_PACKET = 1
_TIMESTAMP, _SEQUENCE, _EVENT, _INTERNED, _FLAGS, _DESCRIPTOR, _COMPRESSED = 8, 10, 11, 12, 13, 60, 50
_CLEARED, _NEEDS_STATE = 1, 2
_ANNOTATIONS, _TYPE, _NAME_ID, _TRACK, _DOUBLE_VALUE, _CATEGORY_ID, _FLOWS = 4, 9, 10, 11, 44, 3, 47
_BEGIN, _END, _COUNTER = 1, 2, 4
_CATEGORIES, _NAMES, _ARGUMENTS = 1, 2, 3
_ARGUMENT_NAME, _INTEGER, _DOUBLE, _STRING = 1, 4, 5, 6
_ARGUMENT_OF = {"iteration": 1, "microbatch": 2, "chunk": 3, "seq": 4, "bytes": 5, "work": 6, "peer": 7}
_GROUP = 8
_CHUNK = 256 << 10
"""Bytes that are compressed together; readers refuse more than 512 KiB."""


def write_pftrace(trace: Trace, path: Path, selection: Selection = EVERYTHING) -> Exported:
    """Write ``trace`` to ``path``. Raises ``OSError`` and ``ScanError``."""
    found = survey(trace, selection)
    ranks = [rank for rank in trace.ranks if selection.has_rank(rank)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        out = _Packets(file)
        for rank in ranks:
            _Rank(trace, rank, found, out).write(selection)
        _write_findings(trace, found, out)
        out.flush()
    return Exported(path=path, events=out.events, ranks=len(ranks), bytes=path.stat().st_size)


class _Packets:
    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._held, self._size = file, list[bytes](), 0
        self.events = 0

    def add(self, packet: bytes) -> None:
        whole = blob(_PACKET, packet)
        self._held.append(whole)
        self._size += len(whole)
        if self._size > _CHUNK:
            self.flush()

    def flush(self) -> None:
        if self._held:
            packed = zlib.compress(b"".join(self._held), 4)
            self._file.write(blob(_PACKET, blob(_COMPRESSED, packed)))
        self._held, self._size = [], 0


class _Process:
    """One process of the trace is one packet sequence: its interned names begin anew."""

    def __init__(self, number: int, found: Survey, out: _Packets) -> None:
        self.number, self.found, self.out = number, found, out
        self.sequence = integer(_SEQUENCE, number + 1)
        self.process = (number + 1) << 32
        self.names: dict[str, int] = {}

    def begin(self, title: str, categories: Sequence[str], arguments: Mapping[str, int]) -> None:
        """Introduce the process, the categories of its events (from number 1 on) and their ``arguments``."""
        # ProcessDescriptor: pid 1, process_name 6. Process 0 is the idle task to viewers.
        process = integer(1, self.number + 1) + text(6, title)
        self.out.add(self.sequence + blob(_DESCRIPTOR, integer(1, self.process) + blob(3, process)))
        interned = b"".join(
            blob(_CATEGORIES, integer(1, number + 1) + text(2, name))
            for number, name in enumerate(categories)
        )
        interned += b"".join(
            blob(_ARGUMENTS, integer(1, number) + text(2, name)) for name, number in arguments.items()
        )
        self.out.add(self.sequence + integer(_FLAGS, _CLEARED) + blob(_INTERNED, interned))

    def describe(self, track: int, name: str) -> None:
        """Introduce a track."""
        # ThreadDescriptor: pid 1, tid 2, thread_name 5. Threads have numbers of their own over all processes,
        # as a machine's would.
        number = (self.number + 1) * 10_000 + track
        thread = integer(1, self.number + 1) + integer(2, number) + text(5, name)
        parts = integer(1, self.process + 1 + track) + integer(5, self.process) + blob(4, thread)
        self.out.add(self.sequence + blob(_DESCRIPTOR, parts))

    def open(self, time: int, track: int, category: int, name: str, more: bytes) -> None:
        """Begin a slice; ``more``: its arguments and arrows."""
        number = self._name(name)
        event = (
            integer(_TYPE, _BEGIN)
            + integer(_TRACK, self.process + 1 + track)
            + integer(_CATEGORY_ID, category)
            + integer(_NAME_ID, number)
            + more
        )
        self.event(time, event)
        self.out.events += 1

    def close(self, time: int, track: int) -> None:
        """End the innermost slice of a track."""
        self.event(time, integer(_TYPE, _END) + integer(_TRACK, self.process + 1 + track))

    def event(self, time: int, event: bytes) -> None:
        """One event at ``time``, ns of the reference clock."""
        at = max(0, time - self.found.origin)
        self.out.add(
            integer(_TIMESTAMP, at) + self.sequence + integer(_FLAGS, _NEEDS_STATE) + blob(_EVENT, event)
        )

    def _name(self, name: str) -> int:
        number = self.names.get(name)
        if number is None:
            number = self.names[name] = len(self.names) + 1
            interned = blob(_INTERNED, blob(_NAMES, integer(1, number) + text(2, name)))
            self.out.add(self.sequence + integer(_FLAGS, _NEEDS_STATE) + interned)
        return number


class _Rank(_Process):
    """The process of one rank."""

    def __init__(self, trace: Trace, rank: int, found: Survey, out: _Packets) -> None:
        super().__init__(rank, found, out)
        self.trace = trace
        self.counters: dict[str, int] = {}
        self.tracks: set[int] = set()

    def write(self, selection: Selection) -> None:
        named = {"step" if name == "iteration" else name: number for name, number in _ARGUMENT_OF.items()}
        self.begin(rank_title(self.trace, self.number), KINDS, {**named, "group": _GROUP})
        lanes, plotted = Lanes(), Plotted()
        for piece in pieces(self.trace, self.number, selection):
            texts = labels(piece)
            arguments = list(_arguments(piece))
            flows = {index: _flow(arrow) for index, (_, arrow) in arrows_of(piece, self.found).items()}
            kinds = piece.spans["kind"].tolist()
            track, stack = -1, list[int]()
            for each in slices(piece, lanes):
                if each.track != track:
                    self._close(track, stack, None)
                    track = each.track
                    self._track(track, step_thread(piece))
                self._close(track, stack, each.begin)
                stack.append(min(each.end, stack[-1]) if stack else each.end)
                more = arguments[each.index] + flows.pop(each.index, b"")
                self.open(each.begin, track, kinds[each.index] + 1, texts[each.index], more)
            self._close(track, stack, None)
            for time, name, value in counter_points(piece.counters, piece.strings, plotted):
                self._counter(time, name, value)

    def _track(self, track: int, training: int) -> None:
        if track not in self.tracks:
            self.tracks.add(track)
            self.describe(track, track_name(track, training))

    def _close(self, track: int, stack: list[int], before: int | None) -> None:
        while stack and (before is None or stack[-1] <= before):
            self.close(stack.pop(), track)

    def _counter(self, time: int, name: str, value: float) -> None:
        if name not in self.counters:
            number = self.counters[name] = self.process + (1 << 20) + len(self.counters)
            parts = integer(1, number) + integer(5, self.process) + text(2, name) + blob(8, b"")
            self.out.add(self.sequence + blob(_DESCRIPTOR, parts))
        track = integer(_TRACK, self.counters[name])
        self.event(time, integer(_TYPE, _COUNTER) + track + double(_DOUBLE_VALUE, value))
        self.out.events += 1


def _write_findings(trace: Trace, found: Survey, out: _Packets) -> None:
    """A process of its own, with a bar over the steps of each finding."""
    bars = finding_bars(trace, found)
    if not bars:
        return
    process = _Process(findings_process(trace), found, out)
    process.begin(FINDINGS_TITLE, ("finding",), {"confidence": 1, "evidence": 2})
    for track, (begin, end, finding) in enumerate(bars):
        confidence = integer(_ARGUMENT_NAME, 1) + double(_DOUBLE, finding.confidence)
        evidence = integer(_ARGUMENT_NAME, 2) + text(_STRING, "; ".join(finding.evidence))
        more = blob(_ANNOTATIONS, confidence) + blob(_ANNOTATIONS, evidence)
        process.describe(track, f"finding {track + 1}")
        process.open(begin, track, 1, headline(finding), more)
        process.close(end, track)


def _arguments(piece: Piece) -> Iterator[bytes]:
    spans = piece.spans
    columns = [(number, name, spans[name].tolist()) for name, number in _ARGUMENT_OF.items()]
    groups = {
        number: blob(_ANNOTATIONS, integer(_ARGUMENT_NAME, _GROUP) + text(_STRING, group.name))
        for number, group in piece.groups.items()
    }
    of = spans["group"].tolist()
    for index in range(len(spans)):
        parts = [groups.get(of[index], b"")]
        for number, name, values in columns:
            value = values[index]
            if value > 0 or (value == 0 and name not in ("work", "bytes")):
                parts.append(blob(_ANNOTATIONS, integer(_ARGUMENT_NAME, number) + integer(_INTEGER, value)))
        yield b"".join(parts)


def _flow(arrow: Arrow) -> bytes:
    """Both ends of an arrow carry one number."""
    return fixed64(_FLOWS, arrow_number(arrow))


_FLOAT = struct.Struct("<d")
_FIXED = struct.Struct("<Q")


def varint(value: int) -> bytes:
    """An unsigned integer, 7 bits a byte, lowest first."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(field: int, value: int) -> bytes:
    """A varint field; negative values as two's complement of 64 bits."""
    return varint(field << 3) + varint(value & 0xFFFFFFFFFFFFFFFF)


def fixed64(field: int, value: int) -> bytes:
    """An unsigned 64-bit field."""
    return varint(field << 3 | 1) + _FIXED.pack(value)


def double(field: int, value: float) -> bytes:
    """A 64-bit floating-point field."""
    return varint(field << 3 | 1) + _FLOAT.pack(value)


def blob(field: int, value: bytes) -> bytes:
    """Bytes, or a message within the message."""
    return varint(field << 3 | 2) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    """A string field."""
    return blob(field, value.encode())
