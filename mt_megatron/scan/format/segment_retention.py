"""The segments of one rank as a ring: a new file when one is full, the oldest removed when all are."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mt_megatron.host.machine import machine

from .names import Names
from .permissions import make_private_folder
from .records import SPAN
from .run_files import segment_number, segment_path, segment_paths
from .segments import SegmentWriter, segment_meta

MOST_BYTES = 1 << 30
_SEGMENTS = 32
_SMALLEST, _LARGEST = 64 << 10, 32 << 20


class SegmentRing:
    """Writes one session of one rank; at most ``most_bytes`` on disk, those of earlier sessions included.

    Raises ``OSError`` when the file system refuses.
    """

    def __init__(
        self, folder: Path, rank: int, names: Names, meta: Mapping[str, Any], *, most_bytes: int = MOST_BYTES
    ) -> None:
        """Begin the session after the last one in ``folder`` (``meta["session"]`` says otherwise)."""
        make_private_folder(folder.parent)
        make_private_folder(folder)
        self._folder = folder
        self._rank = rank
        self._names = names
        self._most_bytes = most_bytes
        self._segment_bytes = min(_LARGEST, max(_SMALLEST, most_bytes // _SEGMENTS))
        earlier = segment_paths(folder)
        self._sizes = {path: path.stat().st_size for path in earlier}
        self._next = segment_number(earlier[-1]) + 1 if earlier else 0
        session = {"session": _session_after(earlier), "first_segment": self._next}
        self.meta = {**session, **process_facts(), **meta, "rank": rank}
        self._writer: SegmentWriter | None = None
        self._strings = self._groups = 0

    def write(
        self,
        *,
        spans: bytes | bytearray = b"",
        counters: bytes | bytearray = b"",
        pings: bytes | bytearray = b"",
        notes: tuple[Mapping[str, Any], ...] = (),
        threads: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Append records (bytes of ``records`` types) and notes, after the names that they refer to.

        ``threads`` returns the names of threads by number, for a new segment's first note.
        """
        for note in notes:
            self._writer_for(0, threads).note(note)
        for part in _parts(spans, self._segment_bytes // 2):
            self._writer_for(len(part), threads).spans(part)
        writer = self._writer_for(len(counters) + len(pings), threads)
        writer.counters(counters)
        writer.pings(pings)

    def close(self) -> None:
        """Close the newest segment."""
        if self._writer is not None:
            self._writer.close()

    def _writer_for(self, more: int, threads: Callable[[], Mapping[str, str]]) -> SegmentWriter:
        """A segment with room for ``more`` bytes, all names so far in it."""
        if self._writer is None or self._writer.size + more > self._segment_bytes:
            self._begin_segment(threads())
        writer = self._writer
        assert writer is not None
        strings, groups = self._names.strings, self._names.groups
        if len(strings) > self._strings:
            new = strings[self._strings :]
            writer.strings(new)
            self._strings += len(new)
        if len(groups) > self._groups:
            numbers = range(self._groups + 1, len(groups) + 1)
            writer.groups({number: groups[number] for number in numbers})
            self._groups = numbers[-1]
        return writer

    def _begin_segment(self, threads: Mapping[str, str]) -> None:
        if self._writer is not None:
            self._sizes[self._writer.path] = self._writer.size
            self._writer.close()
        kept = self._most_bytes - self._segment_bytes
        for path in sorted(self._sizes):
            if sum(self._sizes.values()) <= kept:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            del self._sizes[path]
        path = segment_path(self._folder, self._next)
        meta = {**self.meta, "segment": self._next, "threads": dict(threads), **time_pair()}
        self._next += 1
        self._strings = self._groups = 0
        self._writer = SegmentWriter(path, self._rank, meta)


def _parts(records: bytes | bytearray, most: int) -> Iterator[bytes | bytearray]:
    """``records`` cut between two spans into pieces of ``most`` bytes."""
    size = most // SPAN.itemsize * SPAN.itemsize
    return (records[start : start + size] for start in range(0, len(records), size))


def process_facts() -> dict[str, Any]:
    """Host, process and clock, as every first note has them."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": machine("time"),
        "clock": time.get_clock_info("perf_counter").implementation,
        "python": platform.python_version(),
    }


def time_pair() -> dict[str, int]:
    """``monotonic_ns`` (``perf_counter_ns``) and ``unix_ns`` of the same moment, ``within_ns`` of each other:
    the narrowest of several readings."""
    pairs = []
    for _ in range(5):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        pairs.append((after - before, (before + after) // 2, unix))
    width, monotonic, unix = min(pairs)
    return {"monotonic_ns": monotonic, "unix_ns": unix, "within_ns": width}


def _session_after(earlier: list[Path]) -> int:
    for path in reversed(earlier):
        with contextlib.suppress(Exception):
            meta = segment_meta(path)
            if meta is not None:
                return int(meta.get("session", 0)) + 1
    return 0
