"""Bound of a node's file and its write-ahead log together, which both hold before each transaction.

Oldest tensors and tokens are thinned first, then old vectors, scalars last. Thinning removes every second
step of the older half of what is there, so that after many rounds the density falls with age and no stretch
of the run is empty; the newest steps stay whole. Pages that become free are used again, and what lies above
the file's part of the bound goes back to the disk.

The log grows with each transaction until all of it is copied to the file and no reader needs it: a reader
that stays in one statement keeps all that is written meanwhile. The rest of the bound is the log's; where
that does not suffice, frames wait for the reader.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .schema import DECLARED_ONCE, JOURNAL_BYTES, WRITER_SECONDS

FULL = 0.95
"""Share of the file's part of the bound from which on rows are removed."""

TARGET = 0.85
"""Share of it that is left then at most, and the file's part of the bound; the rest is the log's."""

LEAST_BYTES = 2 * 2**20
"""Smallest bound: below it the tables' names would not fit."""

_MOST_ROUNDS = 200


_TENSOR_SHARE = 0.5
"""Of the bound: above it single tensors of the newest steps go before vectors and scalars are thinned."""

_GONE = "(session, step) IN (SELECT session, step FROM temp.gone)"


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Rows that are thinned together."""

    name: str
    keep: int
    """Newest steps that stay whatever else is kept."""

    steps: str
    """Query of (session, step), oldest first."""

    remove: tuple[str, ...]
    """Statements that remove the steps in the table ``temp.gone``."""


_TENSORS = _Kind(
    name="tensors",
    keep=2,
    steps="SELECT session, step FROM tensor UNION SELECT session, step FROM tokens ORDER BY 1, 2",
    remove=(
        "DELETE FROM chunk WHERE shard IN (SELECT shard.id FROM shard JOIN tensor "
        f"ON tensor.id = shard.tensor WHERE {_GONE})",
        f"DELETE FROM shard WHERE tensor IN (SELECT id FROM tensor WHERE {_GONE})",
        f"DELETE FROM tensor WHERE {_GONE}",
        f"DELETE FROM tokens WHERE {_GONE}",
    ),
)

_OTHERS = (
    _Kind(
        name="vectors",
        keep=32,
        steps="SELECT DISTINCT session, step FROM vector ORDER BY 1, 2",
        remove=(f"DELETE FROM vector WHERE {_GONE}",),
    ),
    _Kind(
        name="rank steps",
        keep=256,
        steps="SELECT DISTINCT session, step FROM rank_step ORDER BY 1, 2",
        remove=(f"DELETE FROM rank_step WHERE {_GONE}",),
    ),
    _Kind(
        name="scalars",
        keep=256,
        steps="SELECT session, step FROM sampled ORDER BY 1, 2",
        remove=(
            f"DELETE FROM value WHERE {_GONE}",
            f"DELETE FROM vector WHERE {_GONE}",
            f"DELETE FROM sampled WHERE {_GONE}",
        ),
    ),
    _Kind(
        name="steps",
        keep=1024,
        steps="SELECT session, step FROM step ORDER BY 1, 2",
        remove=(f"DELETE FROM step WHERE {_GONE}",),
    ),
)


_UNUSED = "session IN (SELECT id FROM session WHERE id <= (SELECT max(id) FROM session) - 8 " + "".join(
    f"AND NOT EXISTS(SELECT 1 FROM {table} AS t WHERE t.session = session.id) "
    for table in ("step", "sampled", "tensor", "tokens")
)
"""Of sessions of which nothing is left; not of the newest, of which more may come."""

_REMOVE_UNUSED = (
    # Later ones are declared once a start, and all attempts look there.
    f"DELETE FROM declared WHERE session < (SELECT value FROM about WHERE key='{DECLARED_ONCE}') "
    f"AND {_UNUSED})",
    # Attempts of one start share the list that the first of them has.
    f"DELETE FROM module WHERE {_UNUSED}) AND EXISTS(SELECT 1 FROM session AS own "
    "JOIN session AS s ON s.name = own.name AND s.attempt < own.attempt "
    "JOIN module AS m ON m.session = s.id AND m.rank = module.rank WHERE own.id = module.session)",
)


class Retention:
    """Bound of ``connection``'s file."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, most_bytes: int, say: Callable[[str], None]
    ) -> None:
        self._connection = connection
        self._execute = connection.execute
        # SQLite would copy the log and write it again from its start: its file would not say how long it is.
        self._execute("PRAGMA wal_autocheckpoint=0")
        self._path = path
        self._given = max(most_bytes, LEAST_BYTES)
        # A transaction may add more to the log than the largest before it.
        self._most = int(FULL * self._given)
        self._say = say
        self._told = False
        self._file_bytes = int(TARGET * self._most)
        """The file's part of the bound."""

        self._coming = 0
        """Bytes of the next transaction."""

        self._largest = self._largest_before = 0
        """Bytes that a transaction has added to the log at most, since rows were removed and before that."""

        self.full_of_tensors = False
        """The bound is reached by what is never removed: tensors are refused."""

    @property
    def log_bytes(self) -> int:
        """The log's part of the bound."""
        return self._most - int(TARGET * self._most)

    def used_bytes(self) -> int:
        """Of the file, without free pages."""
        pages, free, size = (
            self._execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size) + self._coming

    def has_room(self, coming: int = 0) -> bool:
        """Make room for a transaction of ``coming`` bytes: thin until ``TARGET`` of the file's part is left,
        if ``FULL`` of it would be used. Outside a transaction. False: a reader needs the log, which has
        reached its part.

        Raises ``sqlite3.Error``.
        """
        self._coming, needed = coming, max(coming, self._largest, self._largest_before)
        self._file_bytes = self._most - max(self.log_bytes, min(needed, self._most // 2))
        if not self._log_has_room(needed):
            return False
        if self.used_bytes() < FULL * self._file_bytes:
            self.full_of_tensors = False
            return True
        self._largest_before, self._largest = self._largest, 0
        self._remove_unused()
        self._thin(_TENSORS, needed)
        self._remove_single_tensors()
        for kind in _OTHERS:
            self._thin(kind, needed)
        self._remove_unused()
        self._shrink()
        self.full_of_tensors = self.used_bytes() > FULL * self._file_bytes
        self._say_full()
        return self._log_has_room(needed)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Around a transaction: what it adds to the log is kept free for later ones."""
        before = self._log()
        yield
        self._largest = max(self._largest, self._log() - before)

    def _log(self) -> int:
        """Bytes beside the file."""
        return sum(_size(f"{self._path}{suffix}") for suffix in ("-wal", "-shm"))

    def _file(self) -> int:
        """Bytes of the file, also when the log is copied to it."""
        pages, size = (self._execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        return max(int(pages * size), _size(str(self._path)))

    def _log_has_room(self, needed: int) -> bool:
        """Copy the log to the file where it is long or has less room than ``needed``; False: a reader needs
        it."""
        log, room = self._log() + needed, self._most - self._file()
        if log <= min(room, JOURNAL_BYTES):
            return True
        # A log that is long but has room is copied at once or later: readers are waited for where they must.
        self._execute(f"PRAGMA busy_timeout={round(1000 * WRITER_SECONDS) if log > room else 0}")
        self._execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._execute(f"PRAGMA busy_timeout={round(1000 * WRITER_SECONDS)}")
        return not _size(f"{self._path}-wal") or self._log() + needed <= self._most - self._file()

    def _say_full(self) -> None:
        if self.full_of_tensors and not self._told:
            self._told = True
            self._say(
                f"scope: {self._path.name} has reached its bound of {self._given >> 20} MiB and nothing "
                "old is left to thin: tensors are left out until there is room. Raise --scope-retain-mib"
            )

    def _remove_unused(self) -> None:
        """Lists of modules and of ranks' parts, of sessions of which nothing is left."""
        with self.measured():
            self._execute("BEGIN EXCLUSIVE")
            for statement in _REMOVE_UNUSED:
                self._execute(statement)
            self._execute("COMMIT")

    def _shrink(self) -> None:
        """Give back to the disk what the file has above its part of the bound; other free pages are used
        again, which costs nothing."""
        pages, size = (self._execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        excess = pages - self._file_bytes // size
        # A page that is moved comes into the log: the file shrinks when that is copied.
        portion = max(1, self.log_bytes // 2 // size)
        for left in range(excess, 0, -portion):
            if not self._log_has_room(self.log_bytes // 2):
                return
            # ``execute`` would take one step of it, which frees one page.
            self._connection.executescript(f"PRAGMA incremental_vacuum({min(left, portion)})")

    def _thin(self, kind: _Kind, needed: int) -> None:
        for _ in range(_MOST_ROUNDS):
            if self.used_bytes() <= TARGET * self._file_bytes:
                return
            # What a removal adds to the log is not known before: the whole log is for it, if it can be.
            if not (self._log_has_room(self.log_bytes) or self._log_has_room(needed)):
                return
            gone = thinned(self._execute(kind.steps).fetchall(), keep=kind.keep)
            if not gone:
                return
            self._remove(kind, gone)

    def _remove_single_tensors(self) -> None:
        """Of steps that alone are too large, the tensors that came first."""
        kept = self._execute("SELECT sum(bytes) FROM tensor").fetchone()[0] or 0
        excess = min(
            kept + self._coming - _TENSOR_SHARE * self._file_bytes,
            self.used_bytes() - TARGET * self._file_bytes,
        )
        gone: list[tuple[int, int, int]] = []
        while excess > 0:
            row = self._execute(
                "SELECT id, step, bytes FROM tensor WHERE id>? ORDER BY id LIMIT 1",
                (gone[-1][0] if gone else 0,),
            ).fetchone()
            if row is None:
                break
            gone.append(row)
            excess -= row[2]
        if not gone:
            return
        numbers = [(each[0],) for each in gone]
        with self.measured():
            self._execute("BEGIN EXCLUSIVE")
            self._connection.executemany(
                "DELETE FROM chunk WHERE shard IN (SELECT id FROM shard WHERE tensor=?)", numbers
            )
            self._connection.executemany("DELETE FROM shard WHERE tensor=?", numbers)
            self._connection.executemany("DELETE FROM tensor WHERE id=?", numbers)
            steps = [each[1] for each in gone]
            self._note("tensors", len(set(steps)), steps)
            self._execute("COMMIT")

    def _note(self, kind: str, count: int, steps: Sequence[int]) -> None:
        self._execute(
            "INSERT OR REPLACE INTO thinned VALUES (?, ?, ?, ?, ?)",
            (time.time_ns(), kind, count, min(steps), max(steps)),
        )

    def _remove(self, kind: _Kind, steps: Sequence[tuple[int, int]]) -> None:
        self._execute(
            "CREATE TEMP TABLE IF NOT EXISTS gone(session, step, PRIMARY KEY(session, step)) WITHOUT ROWID"
        )
        with self.measured():
            self._execute("BEGIN EXCLUSIVE")
            self._execute("DELETE FROM temp.gone")
            self._connection.executemany("INSERT INTO temp.gone VALUES (?, ?)", steps)
            for statement in kind.remove:
                self._execute(statement)
            self._note(kind.name, len(steps), [step for _, step in steps])
            self._execute("COMMIT")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def thinned(steps: Sequence[tuple[int, int]], *, keep: int) -> list[tuple[int, int]]:
    """Of ``steps``, oldest first, those to remove: every second of the older half, but none of the newest
    ``keep``; the oldest where only few more than ``keep`` are left."""
    old = list(steps[: max(0, len(steps) - keep)])
    if len(old) < 4:
        return old[:1]
    return old[1 : max(2, len(steps) // 2) : 2] or old[:1]
