"""The files of a trace: append-only blocks with checksums, whole up to the last one that was written.

    file    magic "MTSCAN\\x00\\x01" (8 bytes), format version u4, rank u4
    block   magic u4, kind u2, flags u2, length u4, crc32 u4, then length bytes

All little-endian. The checksum covers kind, flags, length and payload. Each file repeats the tables of
strings and groups that its records refer to, so that it can be read without the others. A file whose
writer was killed ends in the middle of a block at worst; readers stop before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ScanError

from .permissions import open_private
from .recording_end import read_ended
from .records import COUNTER, FORMAT_VERSION, OPEN, PING, SPAN
from .run_files import segment_number, segment_paths

STRINGS, GROUPS, SPANS, COUNTER_VALUES, PINGS, NOTE = 1, 2, 3, 4, 5, 6
"""Kinds of blocks: JSON list appended to the table of strings, JSON list of groups, arrays of
``records.SPAN``, ``COUNTER`` and ``PING``, one JSON object."""

_FILE_MAGIC = b"MTSCAN\x00\x01"
_FILE = struct.Struct("<8sII")
_BLOCK_MAGIC = 0x4B4C424D
_BLOCK = struct.Struct("<IHHII")
_CHECKED = struct.Struct("<HHI")
_ARRAYS = {SPANS: SPAN, COUNTER_VALUES: COUNTER, PINGS: PING}
_OBJECTS = (STRINGS, GROUPS, NOTE)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A process group as a trace names it."""

    name: str
    """``tp``, ``dp``, ``world`` ..."""

    ranks: tuple[int, ...]
    """Global ranks of its members; empty where nobody told."""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank wrote in one session (from a start of its process to its end)."""

    meta: dict[str, Any]
    """The first note: rank, host, pid, clock, session, coordinates ..."""

    strings: list[str]
    """Names by number; number 0 is the empty string."""

    groups: dict[int, Group]
    """Groups by number; 0, for none, is not among them."""

    spans: NDArray[np.void]
    """``records.SPAN``, in the order in which they ended; spans that were written while open and ended later
    are there once."""

    counters: NDArray[np.void]
    """``records.COUNTER``, in the order of time."""

    pings: NDArray[np.void]
    """``records.PING``."""

    notes: list[dict[str, Any]]
    """All notes, without the repeated ones at the beginnings of later segments; from ``read_rank`` the last
    one is how the recording ended, where that is known."""

    unreadable: tuple[str, ...] = field(default=())
    """Sentences on segments that could not be read, or not to their ends."""

    torn: tuple[str, ...] = field(default=())
    """Sentences on segments whose last block is torn, or broken: what lies behind it is not read."""

    @property
    def damaged(self) -> tuple[str, ...]:
        """All of these sentences."""
        return (*self.unreadable, *self.torn)


class SegmentWriter:
    """Appends blocks to one new file, each with one ``write``, so that a killed process tears one at most.

    Raises ``OSError`` as the file system does; what was complete before stays readable: a block that did
    not fit is cut off again.
    """

    def __init__(self, path: Path, rank: int, meta: Mapping[str, Any]) -> None:
        """Make ``path``, which must not exist. ``meta`` becomes the first note."""
        self.path = path
        self._strings = 0
        self._file = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self.size = 0
        try:
            self._append(_FILE.pack(_FILE_MAGIC, FORMAT_VERSION, rank))
            self.note({**meta, "what": "meta"})
        except BaseException:
            self.close()
            raise

    def strings(self, texts: Sequence[str]) -> None:
        """Append to the table; the first string of a file has number 0."""
        if texts:
            self._object(STRINGS, list(texts))
            self._strings += len(texts)

    def groups(self, groups: Mapping[int, Group]) -> None:
        """Add groups by number."""
        if groups:
            rows = [{"id": number, "name": g.name, "ranks": list(g.ranks)} for number, g in groups.items()]
            self._object(GROUPS, rows)

    def spans(self, spans: NDArray[np.void] | bytes | bytearray) -> None:
        """Append ``records.SPAN``, as an array or as its bytes."""
        self._array(SPANS, spans)

    def counters(self, counters: NDArray[np.void] | bytes | bytearray) -> None:
        """Append ``records.COUNTER``, as an array or as its bytes."""
        self._array(COUNTER_VALUES, counters)

    def pings(self, pings: NDArray[np.void] | bytes | bytearray) -> None:
        """Append ``records.PING``, as an array or as its bytes."""
        self._array(PINGS, pings)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Append one JSON object; ``what`` says what it is."""
        self._object(NOTE, dict(facts))

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _object(self, kind: int, value: Any) -> None:
        # What somebody put into a note must not end the trace.
        text = json.dumps(value, separators=(",", ":"), default=repr, skipkeys=True)
        self._block(kind, text.encode())

    def _array(self, kind: int, rows: NDArray[np.void] | bytes | bytearray) -> None:
        wanted = _ARRAYS[kind]
        if isinstance(rows, np.ndarray):
            if rows.dtype != wanted:
                raise ScanError(
                    f"found records of {rows.dtype}, expected {wanted}; see scan/format/records.py"
                )
            rows = rows.tobytes()
        if len(rows) % wanted.itemsize:
            raise ScanError(f"found {len(rows)} bytes of records, expected a multiple of {wanted.itemsize}")
        if rows:
            self._block(kind, bytes(rows))

    def _block(self, kind: int, payload: bytes) -> None:
        head = _CHECKED.pack(kind, 0, len(payload))
        checksum = zlib.crc32(payload, zlib.crc32(head))
        self._append(_BLOCK.pack(_BLOCK_MAGIC, kind, 0, len(payload), checksum) + payload)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise
        self.size += len(data)


def read_blocks(path: Path, offset: int = 0) -> Iterator[tuple[int, Any, int]]:
    """``(kind, payload, next_offset)`` of every whole block from ``offset`` on.

    Payloads are read-only arrays of ``records`` types, or what JSON says; of kinds that this version does
    not know, ``bytes``. To follow a growing file call it again with the last ``next_offset`` (0 if there
    was none). Ends before a block that is torn or whose checksum is wrong. Raises ``ScanError`` when the
    file is no segment, or of another version.
    """
    with open(path, "rb") as file:
        if offset == 0:
            if not _is_segment(path, file.read(_FILE.size)):
                return
            offset = _FILE.size
        file.seek(offset)
        while (block := _read_block(file)) is not None:
            kind, payload = block
            offset += _BLOCK.size + len(payload)
            yield kind, _decoded(kind, payload), offset


def read_rank(rank_folder: Path, *, session: int | None = None) -> RankTrace:
    """Everything one rank wrote in one session, the newest by default.

    A session is one life of the rank's process: numbers of collectives and transfers begin at 0 in each.
    Segments that cannot be read are left out and named in ``damaged``. Raises ``ScanError`` when no other is
    there.
    """
    readable, damaged = readable_segments(segment_paths(rank_folder))
    by_session: dict[int, list[Path]] = {}
    for path, meta in readable:
        by_session.setdefault(int(meta.get("session", 0)), []).append(path)
    if not by_session:
        raise ScanError(
            next(iter(damaged.values()))
            if damaged
            else f"found no readable segment in {rank_folder}; expected files such as 000000.scan"
        )
    wanted = max(by_session) if session is None else session
    if wanted not in by_session:
        raise ScanError(f"found sessions {sorted(by_session)} in {rank_folder}, expected {wanted}")
    found = read_segments(by_session[wanted])
    ended = read_ended(rank_folder, wanted)
    if ended is not None:
        found.notes.append(ended.note())
    return replace(found, unreadable=(*damaged_in(wanted, readable, damaged), *found.unreadable))


def sessions(rank_folder: Path) -> list[int]:
    """The sessions of which ``rank_folder`` still holds segments that can be read, ascending."""
    readable, _ = readable_segments(segment_paths(rank_folder))
    return sorted({int(meta.get("session", 0)) for _, meta in readable})


def readable_segments(
    paths: Iterable[Path],
) -> tuple[list[tuple[Path, dict[str, Any]]], dict[Path, str]]:
    """Readable files of ``paths``, each with its first note, and damaged ones, each with a sentence on it.

    Files that are gone, or whose first note is not written yet, are in neither. Raises ``PermissionError``.
    """
    readable: list[tuple[Path, dict[str, Any]]] = []
    damaged: dict[Path, str] = {}
    for path in paths:
        try:
            meta = _first_note(path)
        except FileNotFoundError:
            continue
        except PermissionError:
            raise  # the command says who may read it
        except (OSError, ScanError) as error:
            damaged[path] = _unreadable(path, error)
            continue
        if meta is not None:
            readable.append((path, meta))
    return readable, damaged


def damaged_in(
    session: int, readable: Iterable[tuple[Path, Mapping[str, Any]]], damaged: Mapping[Path, str]
) -> list[str]:
    """Sentences on the files of one rank that may be of ``session``, of what ``readable_segments`` returned.
    Those of earlier sessions have smaller numbers than its first file."""
    first = 0
    for path, meta in readable:
        of = int(meta.get("session", 0))
        if of < session:
            first = max(first, segment_number(path) + 1)
        elif of == session:
            # Files of earlier versions do not say it.
            first = max(first, int(meta.get("first_segment", 0)))
    return [sentence for path, sentence in damaged.items() if segment_number(path) >= first]


def segment_meta(path: Path) -> dict[str, Any] | None:
    """The first note of a segment; None when not even that was written, or the file is gone or damaged."""
    readable, _ = readable_segments([path])
    return readable[0][1] if readable else None


def _first_note(path: Path) -> dict[str, Any] | None:
    for kind, payload, _ in read_blocks(path):
        return payload if kind == NOTE and payload.get("what") == "meta" else None
    return None


def _unreadable(path: Path, error: OSError | ScanError) -> str:
    if isinstance(error, ScanError):
        return str(error)
    return f"{path} cannot be read ({error}); copy it again from the machine of its rank"


def read_segments(paths: Sequence[Path]) -> RankTrace:
    """Segments of one rank and session, oldest first, as one trace. Raises ``PermissionError``."""
    meta: dict[str, Any] = {}
    tables: list[list[str]] = [[]]
    groups: dict[int, Group] = {}
    arrays: dict[int, list[NDArray[np.void]]] = {kind: [] for kind in _ARRAYS}
    notes: list[dict[str, Any]] = []
    unreadable: list[str] = []
    torn: list[str] = []
    for path in paths:
        own: list[str] = []
        tables.append(own)
        end = _FILE.size
        try:
            for block in read_blocks(path):
                kind, payload, end = block
                if kind in arrays:
                    arrays[kind].append(payload)
                elif kind == STRINGS:
                    own.extend(payload)
                elif kind == GROUPS:
                    for row in payload:
                        groups[int(row["id"])] = Group(name=row["name"], ranks=tuple(row["ranks"]))
                elif kind == NOTE and payload.get("what") == "meta" and meta:
                    continue
                elif kind == NOTE:
                    meta = meta or payload
                    notes.append(payload)
            size = path.stat().st_size
        except FileNotFoundError:
            continue
        except PermissionError:
            raise
        except (OSError, ScanError) as error:
            unreadable.append(_unreadable(path, error))
            continue
        if size > end:
            torn.append(f"{path}: the last {size - end} of {size} bytes are no whole block")
    return RankTrace(
        meta=meta,
        # The table only grows, so that the longest says what all numbers mean.
        strings=max(tables, key=len),
        groups=groups,
        spans=without_ended(_joined(arrays[SPANS], SPAN)),
        counters=_joined(arrays[COUNTER_VALUES], COUNTER),
        pings=_joined(arrays[PINGS], PING),
        notes=notes,
        unreadable=tuple(unreadable),
        torn=tuple(torn),
    )


def dropped_events(notes: Sequence[Mapping[str, Any]]) -> int:
    """Records that were given up before they were written: each note says how many so far, and why."""
    so_far: dict[str, int] = {}
    for note in notes:
        if note.get("what") == "dropped":
            why = str(note.get("why"))
            so_far[why] = max(so_far.get(why, 0), int(note.get("events") or 0))
    return sum(so_far.values())


def without_ended(spans: NDArray[np.void]) -> NDArray[np.void]:
    """``spans`` without those written while open of which the whole is there as well."""
    is_open = spans["end"] == OPEN
    if not is_open.any():
        return spans
    keys = ["begin", "kind", "thread"]
    ended = set(spans[keys][~is_open & np.isin(spans["begin"], spans["begin"][is_open])].tolist())
    keep = np.ones(len(spans), dtype=bool)
    seen: set[tuple[int, ...]] = set()
    # Backwards: of one that was written open twice (again in the next segment), the last stays.
    for index in reversed(np.flatnonzero(is_open).tolist()):
        record = spans[index]
        key = tuple(record[keys].tolist())
        full = (*key, int(record["peer"]), int(record["name"]))
        keep[index] = key not in ended and full not in seen
        seen.add(full)
    return spans[keep]


def _joined(arrays: list[NDArray[np.void]], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)


def _is_segment(path: Path, head: bytes) -> bool:
    """False while the head is not all there yet."""
    if len(head) < _FILE.size:
        if not _FILE_MAGIC.startswith(head[: len(_FILE_MAGIC)]):
            raise ScanError(f"{path} is no segment of a trace: it begins with {head!r}")
        return False
    magic, version, _ = _FILE.unpack(head)
    if magic != _FILE_MAGIC:
        raise ScanError(
            f"{path} is no segment of a trace: it begins with {magic!r}, expected {_FILE_MAGIC!r}"
        )
    if version != FORMAT_VERSION:
        raise ScanError(
            f"{path}: found format version {version}, expected {FORMAT_VERSION}; read it with the version of "
            "mt_megatron that wrote it"
        )
    return True


def _read_block(file: Any) -> tuple[int, bytes] | None:
    head = file.read(_BLOCK.size)
    if len(head) < _BLOCK.size:
        return None
    magic, kind, flags, length, checksum = _BLOCK.unpack(head)
    if magic != _BLOCK_MAGIC:
        return None
    payload = file.read(length)
    if (
        len(payload) < length
        or zlib.crc32(payload, zlib.crc32(_CHECKED.pack(kind, flags, length))) != checksum
    ):
        return None
    return kind, payload


def _decoded(kind: int, payload: bytes) -> Any:
    if kind in _ARRAYS:
        return np.frombuffer(payload, dtype=_ARRAYS[kind])
    if kind in _OBJECTS:
        return json.loads(payload)
    return payload
