"""Recording of one node: frames of its ranks into the node's SQLite file, in one transaction a tick."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.scope.format.frames import FrameError
from mt_megatron.scope.format.statistics import combined

from .checks import Frame, checked
from .combining import DERIVED_OF, Combined, Parts, fits, number
from .declared import Declared
from .node import sessions_before
from .retention import Retention
from .schema import DECLARED_ONCE, SHORT, connect_writer, is_busy, is_full
from .tensors import chunks, matrix_tiles
from .transactions import MOST_HELD_BYTES, PAUSE_SECONDS, Transactions, arrays_bytes, counted, portions_of

TICK_SECONDS = 0.25
"""Between two transactions."""

CLOSING_TRIES = 2
"""To get the lock at the end."""


@dataclass(kw_only=True)
class _Rank:
    """Session of a rank: its schemas and how far it is."""

    session: int
    name: str
    hello: dict[str, Any]
    schemas: dict[int, list[tuple[int, str, int]]] = field(default_factory=dict)
    """Entry (0: ignored), statistic and length of the values that a schema lists."""

    last_step: int = -1
    sampled: bool = False
    """True where statistics of the attempt are written."""

    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A statistic that left its band, or a first NaN, or a dead expert."""

    step: int
    kind: str
    path: str
    statistic: str
    value: float
    low: float
    high: float
    text: str
    time_ns: int = 0


class Writer:
    """Writes one file. Not thread-safe: one thread calls everything but the constructor.

    A disk without room or a file that fails ends the recording with one line to ``say``; further frames are
    dropped and counted then, and nothing raises.
    """

    def __init__(
        self,
        path: Path,
        *,
        node: int,
        host: str,
        retain_bytes: int,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Raises ``ScopeError`` for a file that is not ours, ``sqlite3.Error`` and ``OSError`` where it
        cannot be written."""
        self.path = path
        self._say = say
        self._connection = connect_writer(path)
        self._transactions = Transactions(self._connection)
        self._retention = Retention(self._connection, path, retain_bytes, say)
        self._ranks: dict[int, _Rank] = {}
        self._paths: dict[str, int] = {}
        self._entries: dict[tuple[int, str], int] = {}
        self._path_of: dict[int, int] = {}
        self._parts = Parts()
        self._marked: set[tuple[int, int, str]] = set()
        self._listed: dict[int, tuple[str, list[tuple[str, str, int]]]] = {}
        """Name of the session and modules that each rank has listed."""

        self._told: set[str] = set()
        self.stopped: str | None = None
        """Why nothing is written any more."""

        self.frames = 0
        """Written since the start."""

        self._lost: dict[int, tuple[int, int]] = {}
        self._refused: dict[int, tuple[int, int]] = {}

        self._execute = self._connection.execute
        self._declared = Declared(self._execute)
        self.before: Mapping[tuple[str, int], tuple[int, int]] = sessions_before(self._execute)
        """Sessions that the file had already, by name and attempt: the last step of each and its last one
        with statistics (-1: none)."""

        # Later, where the lock is not to be had: of an older recording, whose rows say the same.
        self._transactions.run(
            "INSERT OR REPLACE INTO about VALUES ('node', ?), ('host', ?), ('opened_ns', ?)",
            (node, host, time.time_ns()),
        )
        self._transactions.run(
            "INSERT OR IGNORE INTO about VALUES (?, ?)",
            (DECLARED_ONCE, self._execute("SELECT ifnull(max(id), 0) + 1 FROM session").fetchone()[0]),
        )
        self._transactions.be_quick()

    @property
    def lost(self) -> Mapping[int, tuple[int, int]]:
        """Frames and bytes of arrays by rank, since the start: those after the recording stopped, and tensors
        beyond the file's bound. Any thread."""
        return dict(self._lost)

    @property
    def refused(self) -> Mapping[int, tuple[int, int]]:
        """Frames and bytes of arrays by rank, since the start, that the checks refused. Any thread."""
        return dict(self._refused)

    def tick(self, frames: list[tuple[int, Frame]], *, final: bool = False) -> None:
        """Write ``frames`` (rank, frame) and the parts that are whole, in one transaction. Frames that are
        wrong are told once for each cause and left out; all wait for a later tick while another connection
        holds the file's lock."""
        if self.stopped is not None:
            self._lose(frames)
            return
        frames = [*self._transactions.taken(), *frames]
        if not (frames or len(self._parts) or self._transactions.statements):
            return  # a lock for nothing would hold readers up
        portions = portions_of(frames, self._retention.log_bytes // 2)
        for index, portion in enumerate(portions, 1):
            if not self._tick(portion, final=final and index == len(portions)):
                self._wait([frame for each in portions[index - 1 :] for frame in each])
                return

    def _tick(self, frames: list[tuple[int, Frame]], *, final: bool) -> bool:
        """One transaction; False: another connection is in its way. Whatever goes wrong ends the recording
        with a line."""
        if self.stopped is not None:
            self._lose(frames)
            return True
        try:
            if not self._has_room(sum(arrays_bytes(frame) for _, frame in frames)):
                self._transactions.waits = True
                return False
            with self._retention.measured():
                if not self._transactions.begin():
                    return False
                for rank, frame in frames:
                    self._take(rank, frame)
                self._write_parts(final=final)
                self._transactions.commit()
            self.frames += len(frames)
        except Exception as error:  # noqa: BLE001 - whatever it is ends the recording with a line, not the thread
            self._stop(error)
            self._lose(frames)
        return True

    def _wait(self, frames: list[tuple[int, Frame]]) -> None:
        self._lose(self._transactions.hold(frames))
        time.sleep(PAUSE_SECONDS)
        self._tell_once(
            f"{self.path} is locked, or its log kept, as by a long 'scope sql': frames wait, and those "
            f"beyond {MOST_HELD_BYTES >> 20} MiB are dropped; training goes on"
        )

    def _has_room(self, coming: int) -> bool:
        """Apply the bound; another connection's lock puts it off."""
        try:
            return self._retention.has_room(coming)
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            self._transactions.roll_back()
            return True

    def alert(self, alert: Alert, session: tuple[str, int]) -> None:
        """Keep an alert of the ``session`` (name, attempt); written at once."""
        self._outside(
            "INSERT INTO alert(session, step, t, kind, path, statistic, value, low, high, text) "
            "VALUES ((SELECT id FROM session WHERE name=? AND attempt=?), ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *session,
                *(alert.step, alert.time_ns or time.time_ns(), alert.kind, alert.path, alert.statistic),
                *(alert.value, alert.low, alert.high, alert.text),
            ),
        )

    def requested(self, texts: list[str]) -> None:
        """Keep that the ranks were asked for ``texts``."""
        self._outside("INSERT OR REPLACE INTO request VALUES (?, ?)", (time.time_ns(), json.dumps(texts)))

    def dropped(self, source: str, rank: int, frames: int, size: int) -> None:
        """Keep that ``source`` (``sidecar`` or ``checks``) dropped ``frames`` of ``size`` bytes of ``rank``
        so far."""
        known = self._ranks.get(rank) or next(iter(self._ranks.values()), None)
        if known is not None:
            self._outside(
                "INSERT OR REPLACE INTO dropped VALUES (?, ?, ?, ?, ?, ?, ?)",
                (known.session, source, rank, max(known.last_step, 0), time.time_ns(), frames, size),
                ("dropped", known.session, source, rank),
            )

    def close(self) -> None:
        """Write what is held and close the file, without a write-ahead log beside it."""
        for _ in range(CLOSING_TRIES):
            self.tick([], final=True)
            if not self._transactions.waits:
                break
        held = self._transactions.taken()
        if held:
            self._lose(held)
            self._say(f"scope: {self.path} was locked to the end: {len(held)} frames are left out")
        self._connection.close()

    # One frame.

    def _take(self, rank: int, frame: Frame) -> None:
        try:
            found = checked(frame)
            self._written(rank, found)
        except FrameError as error:
            counted(self._refused, rank, frame)
            self._tell_once(f"a frame of rank {rank} is left out: {error}")

    def _written(self, rank: int, frame: dict[str, Any]) -> None:
        kind = frame["k"]
        if kind == "hello":
            self._hello(rank, frame)
            return
        known = self._ranks.get(rank)
        if known is None:
            raise FrameError(f"found a {kind} frame before the rank's hello")
        if kind == "step":
            self._step(rank, known, frame)
        elif kind == "back":
            self._in_attempt(rank, known, frame)
            self._begun(known, frame["first"])
        elif kind == "schema":
            self._schema(rank, known, frame)
        elif kind == "stats":
            self._stats(rank, known, frame)
        elif kind == "tensor":
            self._tensor(rank, known, frame)
        elif kind == "tokens":
            self._tokens(rank, known, frame)
        elif kind == "dropped":
            self._execute(
                "INSERT OR REPLACE INTO dropped VALUES (?, 'rank', ?, ?, ?, ?, ?)",
                (
                    known.session,
                    rank,
                    max(known.last_step, 0),
                    time.time_ns(),
                    frame["frames"],
                    frame["bytes"],
                ),
            )
        elif kind == "bye":
            self._execute(
                "UPDATE rank SET bye_ns=? WHERE session=? AND rank=?", (time.time_ns(), known.session, rank)
            )

    def _hello(self, rank: int, frame: dict[str, Any]) -> None:
        if frame["rank"] != rank:
            raise FrameError(f"found rank {frame['rank']} in a connection of rank {rank}")
        known = self._ranks.get(rank)
        again = known is not None and known.name == frame["session"]
        attempt = known.attempt if known is not None and again else 0
        known = _Rank(session=0, name=frame["session"], hello=frame, attempt=attempt)
        self._ranks[rank] = known
        self._enter(rank, known)

    def _enter(self, rank: int, known: _Rank) -> None:
        """Rows of the rank's session and attempt."""
        frame = known.hello
        self._execute(
            "INSERT OR IGNORE INTO session(name, attempt, started_ns, world_size, layout, model) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                *(known.name, known.attempt, time.time_ns(), frame["world_size"]),
                *(json.dumps(frame["layout"]), json.dumps(frame["model"])),
            ),
        )
        row = self._execute(
            "SELECT id FROM session WHERE name=? AND attempt=?", (known.name, known.attempt)
        ).fetchone()
        known.session = row[0]
        self._execute(
            "INSERT OR REPLACE INTO rank VALUES (?, ?, ?, ?, ?, ?, NULL)",
            (known.session, rank, json.dumps(frame["at"]), frame["host"], frame["pid"], time.time_ns()),
        )
        self._declared.enter(known.session, known.name)
        if self._listed.get(rank) != (known.name, frame["modules"]):
            self._list(rank, known)

    def _list(self, rank: int, known: _Rank) -> None:
        """Rows of the rank's modules, once a start: readers find them in the attempt where they are."""
        self._listed[rank] = (known.name, known.hello["modules"])
        self._execute("DELETE FROM module WHERE session=? AND rank=?", (known.session, rank))
        self._connection.executemany(
            "INSERT INTO module VALUES (?, ?, ?, ?, ?, ?)",
            (
                (known.session, rank, position, self._path_id(path), name, parameters)
                for position, (path, name, parameters) in enumerate(known.hello["modules"])
            ),
        )

    def _in_attempt(self, rank: int, known: _Rank, frame: Mapping[str, Any]) -> None:
        """Enter the attempt that ``frame`` is of. A rank counts up where it goes back, and where it makes a
        step beside the run."""
        attempt = frame["attempt"]
        if attempt < known.attempt:
            raise FrameError(f"found attempt {attempt} of a rank that is in attempt {known.attempt}")
        if attempt > known.attempt:
            known.attempt, known.last_step, known.sampled = attempt, -1, False
            self._enter(rank, known)

    def _begun(self, known: _Rank, step: int) -> None:
        self._execute(
            "UPDATE session SET first_step=? WHERE id=? AND (first_step IS NULL OR first_step>?)",
            (step, known.session, step),
        )

    def _step(self, rank: int, known: _Rank, frame: dict[str, Any]) -> None:
        step = frame["i"]
        self._in_attempt(rank, known, frame)
        if known.last_step < 0:
            self._begun(known, step)
        known.last_step = step
        seconds, memory = frame["seconds"], frame["memory_bytes"]
        self._execute(
            "INSERT INTO step VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1) "
            "ON CONFLICT(session, step) DO UPDATE SET t=min(t, excluded.t), "
            "seconds=max(ifnull(seconds, excluded.seconds), ifnull(excluded.seconds, seconds)), "
            "loss=ifnull(loss, excluded.loss), grad_norm=ifnull(grad_norm, excluded.grad_norm), "
            "lr=ifnull(lr, excluded.lr), tokens=ifnull(tokens, excluded.tokens), "
            "tokens_per_second=ifnull(tokens_per_second, excluded.tokens_per_second), "
            "memory_bytes=max(ifnull(memory_bytes, excluded.memory_bytes), "
            "ifnull(excluded.memory_bytes, memory_bytes)), "
            "skipped=max(skipped, excluded.skipped), ranks=ranks+1",
            (
                *(known.session, step, frame["t"], seconds, frame["loss"], frame["grad_norm"], frame["lr"]),
                *(frame["tokens"], frame["tokens_per_second"], memory, int(frame["skipped"])),
            ),
        )
        self._execute(
            "INSERT OR REPLACE INTO rank_step VALUES (?, ?, ?, ?, ?, ?)",
            (known.session, step, rank, frame["t"], seconds, memory),
        )
        self._perturbed(known, frame)

    def _perturbed(self, known: _Rank, frame: Mapping[str, Any]) -> None:
        text = frame["perturbed"]
        if text is not None and (known.session, frame["i"], text) not in self._marked:
            self._marked.add((known.session, frame["i"], text))
            self._execute(
                "INSERT OR IGNORE INTO perturbed VALUES (?, ?, ?)", (known.session, frame["i"], text)
            )

    # Statistics.

    def _schema(self, rank: int, known: _Rank, frame: dict[str, Any]) -> None:
        entries = []
        for path, statistic, length in frame["entries"]:
            if not fits(statistic, length):
                self._tell_once(
                    f"rank {rank} sends {statistic!r} of {length} elements, which this version "
                    "does not know: it is left out"
                )
                entries.append((0, statistic, length))
            else:
                entries.append((self._entry_id(self._path_id(path), statistic), statistic, length))
        known.schemas[frame["id"]] = entries
        self._declare(rank, known, entries)

    def _declare(self, rank: int, known: _Rank, entries: list[tuple[int, str, int]]) -> None:
        for index, (entry, statistic, length) in enumerate(entries):
            if not entry:
                continue
            others = self._declared.length(known.session, entry, length)
            if others != length:
                self._tell_once(
                    f"rank {rank} sends {statistic!r} of {length} elements, other ranks {others}: its part "
                    "is left out"
                )
                entries[index] = (0, statistic, length)
                continue
            self._declared.add(rank, known.session, entry, length)
            for derived in DERIVED_OF.get(statistic, ()):
                derived_entry = self._entry_id(self._path_of[entry], derived)
                self._declared.add(rank, known.session, derived_entry, 1)

    def _stats(self, rank: int, known: _Rank, frame: dict[str, Any]) -> None:
        entries = known.schemas.get(frame["id"])
        values, step = frame["values"], frame["i"]
        if entries is None:
            raise FrameError(f"found statistics of the schema {frame['id']}, which the rank has not sent")
        length = sum(entry[2] for entry in entries)
        if len(values) != length:
            raise FrameError(f"found {len(values)} values of a schema of {length}")
        self._in_attempt(rank, known, frame)
        if not known.sampled and not frame["beside"]:
            # A session that has no first step is none that the run went on from.
            self._begun(known, step)
        known.sampled = True
        now, at = time.monotonic(), 0
        for entry, statistic, length in entries:
            if entry:
                self._parts.add(known.session, step, entry, statistic, values[at : at + length], now)
            at += length
        self._execute("INSERT OR IGNORE INTO sampled VALUES (?, ?, ?)", (known.session, step, time.time_ns()))
        self._perturbed(known, frame)

    def _write_parts(self, *, final: bool) -> None:
        ready = self._parts.ready(self._declared.ranks, time.monotonic(), final=final, written=self._parts_of)
        for each in ready:
            self._write_value(each)

    def _parts_of(self, session: int, step: int, entry: int) -> int:
        """Parts of a value that are written already."""
        row = self._execute(
            "SELECT parts FROM value WHERE entry=? AND session=? AND step=?", (entry, session, step)
        ).fetchone()
        return 0 if row is None else int(row[0])

    def _write_value(self, new: Combined) -> None:
        key = (new.entry, new.session, new.step)
        part, parts = new.part, new.parts
        row = self._execute(
            "SELECT parts, part FROM value WHERE entry=? AND session=? AND step=?", key
        ).fetchone()
        if row is not None:
            kept = row[1]
            if kept is None:
                found = self._execute(
                    "SELECT part FROM vector WHERE entry=? AND session=? AND step=?", key
                ).fetchone()
                kept = None if found is None else found[0]
            if kept is None:
                return  # thinned since: a late part can no longer be added
            part, parts = combined(new.statistic, [np.frombuffer(kept, "<f8"), part]), parts + row[0]
        raw = np.ascontiguousarray(part, "<f8").tobytes()
        # Derived statistics find their source's part in one place.
        short = len(part) <= SHORT and new.statistic not in DERIVED_OF
        self._execute(
            "INSERT OR REPLACE INTO value VALUES (?, ?, ?, ?, ?, ?)",
            (*key, parts, number(new.statistic, part), raw if short else None),
        )
        if not short:
            self._execute("INSERT OR REPLACE INTO vector VALUES (?, ?, ?, ?)", (*key, raw))
        for derived in DERIVED_OF.get(new.statistic, ()):
            entry = self._entry_id(self._path_of[new.entry], derived)
            self._execute(
                "INSERT OR REPLACE INTO value VALUES (?, ?, ?, ?, ?, NULL)",
                (entry, new.session, new.step, parts, number(derived, part)),
            )

    # Tensors and tokens.

    def _tensor(self, rank: int, known: _Rank, frame: dict[str, Any]) -> None:
        if self._retention.full_of_tensors:
            self._lose([(rank, frame)])
            return
        self._in_attempt(rank, known, frame)
        data, indices = frame["data"], json.dumps(frame["index"], separators=(",", ":"))
        key = (
            known.session,
            frame["i"],
            self._path_id(frame["path"]),
            frame["what"],
            frame["microbatch"],
            indices,
        )
        self._execute(
            "INSERT OR IGNORE INTO tensor(session, step, path, what, microbatch, indices, shape, perturbed, "
            "bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0)",
            (*key, json.dumps(frame["shape"]), frame["perturbed"]),
        )
        tensor, shape = self._execute(
            "SELECT id, shape FROM tensor WHERE session=? AND step=? AND path=? AND what=? AND microbatch=? "
            "AND indices=?",
            key,
        ).fetchone()
        if shape != json.dumps(frame["shape"]):
            raise FrameError(
                f"found a shard of {frame['what']} of {frame['path']} within {list(frame['shape'])}, others "
                f"within {shape}"
            )
        scale, low, high = frame["scale"], frame["low"], 1
        if scale is not None and data.size:
            scale, low, high = matrix_tiles(scale, low, data.shape)
        offset = json.dumps(frame["offset"])
        old = self._execute("SELECT id FROM shard WHERE tensor=? AND offset=?", (tensor, offset)).fetchone()
        if old is not None:
            self._execute("DELETE FROM chunk WHERE shard=?", old)
            self._execute("DELETE FROM shard WHERE id=?", old)
        shard = self._execute(
            "INSERT INTO shard(tensor, rank, offset, shape, encoding, tile_rows, error) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (tensor, rank, offset, json.dumps(data.shape), frame["encoding"], high, frame["error"]),
        ).lastrowid
        size = 0
        for each in chunks(
            frame["encoding"], data, scale, low, whole=frame["shape"], offset=frame["offset"], high=high
        ):
            size += len(each.data) + len(each.scale or b"") + len(each.low or b"")
            self._execute(
                "INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (shard, each.level, each.first, each.rows, each.columns, each.data, each.scale, each.low),
            )
        self._execute("UPDATE tensor SET bytes=bytes+? WHERE id=?", (size, tensor))
        self._perturbed(known, frame)

    def _tokens(self, rank: int, known: _Rank, frame: dict[str, Any]) -> None:
        if self._retention.full_of_tensors:
            self._lose([(rank, frame)])
            return
        self._in_attempt(rank, known, frame)
        top = frame["top_ids"]

        def raw(array: Any, dtype: str) -> bytes | None:
            return None if array is None else np.ascontiguousarray(array, dtype).tobytes()

        self._execute(
            "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(known.session, frame["i"], self._path_id(frame["path"]), rank, frame["microbatch"]),
                *(frame["sample"], frame["position"], frame["parts"], len(frame["ids"])),
                *(0 if top is None else top.shape[1], raw(frame["ids"], "<i8")),
                *(raw(frame["loss"], "<f4"), raw(frame["entropy"], "<f4"), raw(frame["lse"], "<f4")),
                *(raw(top, "<i8"), raw(frame["top_logprobs"], "<f4")),
            ),
        )

    # Names.

    def _path_id(self, text: str) -> int:
        found = self._paths.get(text)
        if found is None:
            self._execute("INSERT OR IGNORE INTO path(text) VALUES (?)", (text,))
            found = self._paths[text] = self._execute("SELECT id FROM path WHERE text=?", (text,)).fetchone()[
                0
            ]
        return found

    def _entry_id(self, path: int, statistic: str) -> int:
        found = self._entries.get((path, statistic))
        if found is None:
            key = (path, statistic)
            self._execute("INSERT OR IGNORE INTO entry(path, statistic) VALUES (?, ?)", key)
            row = self._execute("SELECT id FROM entry WHERE path=? AND statistic=?", key).fetchone()
            found = self._entries[key] = row[0]
            self._path_of[found] = path
        return found

    # Troubles.

    def _outside(self, statement: str, values: tuple[Any, ...], key: object = None) -> None:
        """A statement beside frames, as ``Transactions.run`` has it."""
        if self.stopped is None:
            try:
                self._transactions.run(statement, values, key)
            except sqlite3.Error as error:
                self._stop(error)

    def _lose(self, frames: Iterable[tuple[int, Frame]]) -> None:
        for rank, frame in frames:
            counted(self._lost, rank, frame)

    def _stop(self, error: Exception) -> None:
        self.stopped = "the disk is full" if is_full(error) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(sqlite3.Error):
            self._transactions.roll_back()
        self._say(
            f"scope: {self.path} is written no further ({self.stopped}); training goes on, what was "
            "recorded stays"
        )

    def _tell_once(self, text: str) -> None:
        if text not in self._told and len(self._told) < 100:
            self._told.add(text)
            self._say(f"scope: {text}")
