"""Ranks that send parts of each statistic: as many parts make a whole value.

A rank declares an entry once a start, in the attempt that it is in then. Readers take what earlier attempts
of the start have as well (``node.NodeFile.expected``), so that hundreds of attempts cost no more than one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Declared:
    """The file's table, and the same in memory. All methods may raise ``sqlite3.Error``."""

    def __init__(self, execute: Callable[..., Any]) -> None:
        self._execute = execute
        self._starts: dict[int, str] = {}
        self._ranks: dict[tuple[str, int], set[int]] = {}
        self._lengths: dict[tuple[str, int], int] = {}

    def enter(self, session: int, name: str) -> None:
        """``session`` is an attempt of the start ``name``, of which another writer may have declared some."""
        if name not in self._starts.values():
            rows = self._execute(
                "SELECT entry, rank FROM declared WHERE session IN (SELECT id FROM session WHERE name=?)",
                (name,),
            )
            for entry, rank in rows.fetchall():
                self._ranks.setdefault((name, entry), set()).add(rank)
        self._starts[session] = name

    def length(self, session: int, entry: int, length: int) -> int:
        """Elements of the entry's parts, as the first rank sends it; ``length`` where this is the first."""
        return self._lengths.setdefault((self._starts[session], entry), length)

    def add(self, rank: int, session: int, entry: int, length: int) -> None:
        """``rank`` sends parts of ``entry``, of ``length`` elements, from ``session`` on."""
        ranks = self._ranks.setdefault((self._starts[session], entry), set())
        if rank not in ranks:
            ranks.add(rank)
            self._execute(
                "INSERT OR IGNORE INTO declared VALUES (?, ?, ?, ?)", (session, entry, rank, length)
            )

    def ranks(self, session: int, entry: int) -> int:
        """Number of ranks that send parts of ``entry``; at least one, the one that has sent some."""
        return len(self._ranks.get((self._starts[session], entry), ())) or 1
