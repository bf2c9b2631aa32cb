"""Bound of a node's file: oldest tensors and tokens are thinned first, then old vectors, scalars last.

Thinning removes every second step of the older half of what is there, so that after many rounds the density
falls with age and no stretch of the run is empty; the newest steps stay whole. Pages that become free are
used again, and what lies above the bound goes back to the disk.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .schema import DECLARED_ONCE

FULL = 0.95
"""Share of the bound from which on rows are removed."""

TARGET = 0.85
"""Share of the bound that is left then at most."""

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
        self._path = path
        self._most = max(most_bytes, LEAST_BYTES)
        self._say = say
        self._told = False
        self.full_of_tensors = False
        """The bound is reached by what is never removed: tensors are refused."""

    def used_bytes(self) -> int:
        """Of the file, without free pages."""
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def apply(self) -> None:
        """Thin until ``TARGET`` of the bound is left, if ``FULL`` of it is used. Outside a transaction.

        Raises ``sqlite3.Error``.
        """
        if self.used_bytes() < FULL * self._most:
            self.full_of_tensors = False
            return
        self._remove_unused()
        self._thin(_TENSORS, _TENSORS.keep)
        self._remove_single_tensors()
        for kind in _OTHERS:
            self._thin(kind, kind.keep)
        self._remove_unused()
        self._shrink()
        self.full_of_tensors = self.used_bytes() > FULL * self._most
        if self.full_of_tensors and not self._told:
            self._told = True
            self._say(
                f"scope: {self._path.name} has reached its bound of {self._most / 2**20:.0f} MiB and nothing "
                "old is left to thin: tensors are left out until there is room. Raise --scope-retain-mib"
            )

    def _remove_unused(self) -> None:
        """Lists of modules and of ranks' parts, of sessions of which nothing is left."""
        execute = self._connection.execute
        execute("BEGIN EXCLUSIVE")
        for statement in _REMOVE_UNUSED:
            execute(statement)
        execute("COMMIT")

    def _shrink(self) -> None:
        """Give back to the disk what the file has above its bound; other free pages are used again, which
        costs nothing."""
        pages, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
        )
        excess = pages - self._most // size
        if excess > 0:
            # ``execute`` would take one step of it, which frees one page.
            self._connection.executescript(f"PRAGMA incremental_vacuum({excess})")

    def _thin(self, kind: _Kind, keep: int) -> None:
        for _ in range(_MOST_ROUNDS):
            if self.used_bytes() <= TARGET * self._most:
                return
            gone = thinned(self._connection.execute(kind.steps).fetchall(), keep=keep)
            if not gone:
                return
            self._remove(kind, gone)

    def _remove_single_tensors(self) -> None:
        """Of steps that alone are too large, the tensors that came first."""
        execute = self._connection.execute
        kept = execute("SELECT sum(bytes) FROM tensor").fetchone()[0] or 0
        excess = min(kept - _TENSOR_SHARE * self._most, self.used_bytes() - TARGET * self._most)
        gone: list[tuple[int, int, int]] = []
        while excess > 0:
            row = execute(
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
        execute("BEGIN EXCLUSIVE")
        self._connection.executemany(
            "DELETE FROM chunk WHERE shard IN (SELECT id FROM shard WHERE tensor=?)", numbers
        )
        self._connection.executemany("DELETE FROM shard WHERE tensor=?", numbers)
        self._connection.executemany("DELETE FROM tensor WHERE id=?", numbers)
        steps = [each[1] for each in gone]
        self._note("tensors", len(set(steps)), steps)
        execute("COMMIT")

    def _note(self, kind: str, count: int, steps: Sequence[int]) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO thinned VALUES (?, ?, ?, ?, ?)",
            (time.time_ns(), kind, count, min(steps), max(steps)),
        )

    def _remove(self, kind: _Kind, steps: Sequence[tuple[int, int]]) -> None:
        execute = self._connection.execute
        execute(
            "CREATE TEMP TABLE IF NOT EXISTS gone(session, step, PRIMARY KEY(session, step)) WITHOUT ROWID"
        )
        execute("BEGIN EXCLUSIVE")
        execute("DELETE FROM temp.gone")
        self._connection.executemany("INSERT INTO temp.gone VALUES (?, ?)", steps)
        for statement in kind.remove:
            execute(statement)
        self._note(kind.name, len(steps), [step for _, step in steps])
        execute("COMMIT")


def thinned(steps: Sequence[tuple[int, int]], *, keep: int) -> list[tuple[int, int]]:
    """Of ``steps``, oldest first, those to remove: every second of the older half, but none of the newest
    ``keep``; the oldest where only few more than ``keep`` are left."""
    old = list(steps[: max(0, len(steps) - keep)])
    if len(old) < 4:
        return old[:1]
    return old[1 : max(2, len(steps) // 2) : 2] or old[:1]
