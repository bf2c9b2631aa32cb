"""One node's file, open to read: queries from any thread; sessions of all nodes as one row."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_megatron.errors import ScopeError

from .data import Session
from .schema import DECLARED_ONCE, busy, connect_reader, is_busy

_DECLARING = """
WITH RECURSIVE declaring(number) AS (SELECT min(session) FROM declared UNION ALL
  SELECT (SELECT min(session) FROM declared WHERE session > number) FROM declaring WHERE number IS NOT NULL)
SELECT id FROM declaring JOIN session ON session.id = number
"""
"""Sessions that have rows in ``declared``, without a look at each row."""


class NodeFile:
    """A read-only connection. Raises ``ScopeError`` where the file is damaged, also later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = connect_reader(path)
        self._lock = threading.Lock()
        about = dict(self.rows("SELECT key, value FROM about"))
        self.node = int(about.get("node", 0))
        self.host = str(about.get("host", ""))
        self._sessions: dict[tuple[str, int], int] = {}
        self._paths: dict[str, int] = {}
        self._entries: dict[tuple[str, str], int] = {}
        self._declared_once: int | None = None

    def rows(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        try:
            with self._lock:
                return self._connection.execute(statement, values).fetchall()
        except sqlite3.ProgrammingError as error:
            raise ScopeError(f"the recording {self.path} is closed ({error}); open it again") from error
        except sqlite3.DatabaseError as error:
            if is_busy(error):
                raise busy(self.path) from error
            if "readonly" in str(error):
                # Its writer was killed within a transaction: from here on it is read from a private copy.
                with self._lock:
                    old, self._connection = self._connection, connect_reader(self.path)
                    old.close()
                    return self._connection.execute(statement, values).fetchall()
            raise ScopeError(
                f"{self.path} cannot be read ({error}); copy it again with its -wal file beside it"
            ) from error

    def session(self, session: Session) -> int | None:
        """This file's number of ``session``; None where it has none."""
        key = (session.name, session.attempt)
        if key not in self._sessions:
            found = self.rows("SELECT id FROM session WHERE name=? AND attempt=?", key)
            if not found:
                return None
            self._sessions[key] = int(found[0][0])
        return self._sessions[key]

    def entry(self, path: str, statistic: str) -> int | None:
        """This file's number of a statistic of a module; None where it has none."""
        key = (path, statistic)
        if key not in self._entries:
            found = self.rows(
                "SELECT entry.id FROM entry JOIN path ON path.id = entry.path WHERE text=? AND statistic=?",
                key,
            )
            if not found:
                return None
            self._entries[key] = int(found[0][0])
        return self._entries[key]

    def path_id(self, path: str) -> int | None:
        """This file's number of a path; None where it has none."""
        if path not in self._paths:
            found = self.rows("SELECT id FROM path WHERE text=?", (path,))
            if not found:
                return None
            self._paths[path] = int(found[0][0])
        return self._paths[path]

    def declared_in(self, session: Session) -> tuple[int, ...]:
        """This file's numbers of the sessions that say which ranks send what in ``session``: it, and earlier
        attempts of its start."""
        own = self.session(session)
        if own is None:
            return ()
        if self._declared_once is None:
            found = self.rows("SELECT value FROM about WHERE key=?", (DECLARED_ONCE,))
            self._declared_once = int(found[0][0]) if found else None
        if self._declared_once is None or own < self._declared_once:
            return (own,)
        rows = self.rows(_DECLARING + "WHERE name=? AND attempt<=?", (session.name, session.attempt))
        return tuple(number for (number,) in rows)

    def expected(self, session: Session, entry: int | None = None) -> list[tuple[int, int]]:
        """Entries, or the one given, and how many ranks of ``session`` send parts of each."""
        declared = self.declared_in(session)
        if not declared:
            return []
        only = "" if entry is None else f"AND entry={entry} "
        return self.rows(
            f"SELECT entry, count(DISTINCT rank) FROM declared WHERE session IN {_listed(declared)} {only}"
            "AND rank IN (SELECT rank FROM rank WHERE session=?) GROUP BY entry",
            (self.session(session),),
        )

    def ranks(self, session: Session) -> frozenset[int]:
        """Ranks of ``session`` that this file knows."""
        rows = self.rows("SELECT rank FROM rank WHERE session=?", (self.session(session),))
        return frozenset(rank for (rank,) in rows)

    def modules(self, session: Session) -> list[tuple[int, str, str, int]]:
        """Rank, path, class and parameters of the modules of the session's ranks, in each rank's order.
        A rank lists them once a start: in an earlier attempt, where the session's has none of it."""
        lacking = set(self.ranks(session))
        attempts = self.rows(
            "SELECT id FROM session WHERE name=? AND attempt<=? AND EXISTS(SELECT 1 FROM module "
            "WHERE module.session = session.id) ORDER BY attempt DESC",
            (session.name, session.attempt),
        )
        found: list[tuple[int, str, str, int]] = []
        for (attempt,) in attempts:
            if not lacking:
                break
            rows = self.rows(
                "SELECT rank, text, class, parameters FROM module JOIN path ON path.id = module.path "
                "WHERE session=? ORDER BY rank, position",
                (attempt,),
            )
            found += [(rank, *row) for rank, *row in rows if rank in lacking]
            lacking -= {row[0] for row in rows}
        return found

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._connection.close()


def _listed(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})"


@dataclass(kw_only=True)
class _Merged:
    started_ns: int
    world_size: int
    first_step: int | None
    ranks: set[int]


def merged_sessions(nodes: Sequence[NodeFile]) -> tuple[Session, ...]:
    """Sessions of all ``nodes``, oldest first: when a session started says the first node that has it.

    A session that recorded steps replaces those of earlier ones from its first step on: the run went on from
    there. What was replaced stays readable under its session's number.
    """
    merged: dict[tuple[str, int], _Merged] = {}
    for node in nodes:
        ranks: dict[int, set[int]] = {}
        for session, rank in node.rows("SELECT session, rank FROM rank"):
            ranks.setdefault(session, set()).add(rank)
        columns = "id, name, attempt, started_ns, world_size, first_step"
        for number, name, attempt, started, world, first in node.rows(f"SELECT {columns} FROM session"):
            one = merged.setdefault(
                (name, attempt),
                _Merged(started_ns=started, world_size=world, first_step=None, ranks=set()),
            )
            one.ranks |= ranks.get(number, set())
            if first is not None:
                one.first_step = first if one.first_step is None else min(first, one.first_step)
    # Starts by their time; attempts of one by number: nodes, and ranks of one, write them at different times.
    begun: dict[str, int] = {}
    for (name, _), one in merged.items():
        begun[name] = min(one.started_ns, begun.get(name, one.started_ns))
    ordered = sorted(merged.items(), key=lambda item: (begun[item[0][0]], item[0]))
    found: list[Session] = []
    cut: int | None = None
    for index in range(len(ordered) - 1, -1, -1):
        (name, attempt), one = ordered[index]
        found.append(
            Session(
                number=index,
                name=name,
                attempt=attempt,
                started_ns=one.started_ns,
                world_size=one.world_size,
                first_step=one.first_step,
                last_current=None if cut is None else cut - 1,
                ranks=tuple(sorted(one.ranks)),
            )
        )
        if one.first_step is not None:
            cut = one.first_step if cut is None else min(cut, one.first_step)
    return tuple(reversed(found))


def loaded(text: str | None) -> dict[str, Any]:
    """A JSON map of a file, {} for anything else."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def sessions_before(
    execute: Callable[[str], Iterable[tuple[Any, ...]]],
) -> dict[tuple[str, int], tuple[int, int]]:
    """Sessions of a file by name and attempt: the last step of each and its last one with statistics (-1:
    none)."""
    last = "ifnull((SELECT max(step) FROM {} WHERE session = session.id), -1)"
    statement = f"SELECT name, attempt, {last.format('step')}, {last.format('sampled')} FROM session"
    return {(name, attempt): (step, sample) for name, attempt, step, sample in execute(statement)}
