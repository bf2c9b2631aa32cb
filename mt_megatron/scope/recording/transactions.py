"""The writer's transactions, and what waits for one while another connection holds the file's lock."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any

import numpy as np

from .checks import Frame
from .schema import WRITER_SECONDS, is_busy

PAUSE_SECONDS = 0.2
"""Between two tries to get the lock: readers that wait try more often."""

MOST_HELD_BYTES = 64 * 2**20
"""Of frames that wait for the lock."""

MOST_STATEMENTS = 1000
"""Alerts and sums that wait for the lock."""

_ABOUT_BYTES = 1024
"""Of a frame beside its arrays."""

_LARGE = ("tensor", "tokens")
_NEEDED = ("hello", "schema", "back", "bye")
"""Kinds without which later frames of a rank cannot be read."""


class Transactions:
    """Of one connection. All methods may raise ``sqlite3.Error``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute
        self.statements: dict[object, tuple[str, tuple[Any, ...]]] = {}
        """Statements beside frames, for the next transaction; a later one replaces that of the same key."""

        self.held: list[tuple[int, Frame]] = []
        """Frames that wait, with their ranks."""

        self.waits = False
        """True where another connection had the lock at the last try."""

    def be_quick(self) -> None:
        """Wait no longer than ``WRITER_SECONDS`` from now on."""
        self._execute(f"PRAGMA busy_timeout={round(1000 * WRITER_SECONDS)}")

    def begin(self) -> bool:
        """Begin one; False: another connection holds the lock. It is exclusive: the commit of any other waits
        for readers, when what the writer knows in memory has gone on and cannot be taken back."""
        try:
            self._execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            self.waits = True
            return False
        self.waits = False
        return True

    def commit(self) -> None:
        """End it, with the statements that have waited."""
        for statement, values in self.statements.values():
            self._execute(statement, values)
        self._execute("COMMIT")
        self.statements.clear()

    def roll_back(self) -> None:
        """Leave one that has been begun, if any."""
        if self._connection.in_transaction:
            self._execute("ROLLBACK")

    def hold(self, frames: Iterable[tuple[int, Frame]]) -> list[tuple[int, Frame]]:
        """Keep ``frames`` in place of those that are held; returns what is left out of them: tensors and
        tokens beyond half of the room, beyond the room all that later frames do not need."""
        self.held, lost, size = [], [], 0
        for rank, frame in frames:
            more = _ABOUT_BYTES + arrays_bytes(frame)
            kind = frame.get("k")
            room = MOST_HELD_BYTES // 2 if kind in _LARGE else MOST_HELD_BYTES
            if size + more > room and kind not in _NEEDED:
                lost.append((rank, frame))
                continue
            size += more
            self.held.append((rank, frame))
        return lost

    def taken(self) -> list[tuple[int, Frame]]:
        """Frames that are held, which are held no more."""
        held, self.held = self.held, []
        return held

    def run(self, statement: str, values: tuple[Any, ...], key: object = None) -> None:
        """A statement beside frames: at once, or in the next transaction while the lock is waited for. There
        it replaces one of the same ``key`` (None: a key of its own), so that sums, which grow with each
        tick, leave the alerts their room."""
        self.statements[object() if key is None else key] = statement, values
        while len(self.statements) > MOST_STATEMENTS:
            del self.statements[next(iter(self.statements))]
        if not self.waits and self.begin():
            self.commit()


def arrays_bytes(frame: Frame) -> int:
    """Of the frame's arrays."""
    return sum(each.nbytes for each in frame.values() if isinstance(each, np.ndarray))


def portions_of(frames: Iterable[tuple[int, Frame]], most_bytes: int) -> list[list[tuple[int, Frame]]]:
    """``frames``, with their ranks, as transactions that the log has room for: arrays of ``most_bytes`` but
    for a frame that is larger. Statistics of a step change a page of each series, so that those of a later
    step come into the next one. At least one portion."""
    portions: list[list[tuple[int, Frame]]] = [[]]
    size, sampled = 0, set[int]()
    for rank, frame in frames:
        is_sample = frame.get("k") == "stats"
        size += arrays_bytes(frame)
        if portions[-1] and (size > most_bytes or (is_sample and rank in sampled)):
            portions.append([])
            size, sampled = arrays_bytes(frame), set()
        portions[-1].append((rank, frame))
        sampled |= {rank} if is_sample else set()
    return portions


def counted(counts: dict[int, tuple[int, int]], rank: int, frame: Frame) -> None:
    """Add ``frame`` and the bytes of its arrays to the ``counts`` of its rank."""
    frames, size = counts.get(rank, (0, 0))
    counts[rank] = (frames + 1, size + arrays_bytes(frame))
