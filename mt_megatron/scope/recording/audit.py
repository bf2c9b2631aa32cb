"""``RUN/scope/audit.jsonl``: commands, refusals, sessions of the page, what the lab does; an object a line.

Rank 0 and each server of the page append to it: ``time_unix_ns``, ``what``, ``user`` (the process's) and
facts of the event, such as ``step``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint.file_locks import BUSY
from mt_megatron.scan.format.permissions import make_private_folder, open_private

MOST_BYTES = 8 * 2**20
"""Of the file; the one before it is kept as ``audit.jsonl.1``."""

REFUSALS_PER_MINUTE = 60
"""Refusals that are written; of the rest the number is."""

UNWRITTEN = frozenset({"hold", "status"})
"""Commands without a line: an open page repeats them, and they change nothing but how long a pause lasts."""

_LONGEST = 200
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class Audit:
    """Appends lines of JSON. A file that cannot be written costs the line and nothing else: ``lost`` counts
    them, and the first is said."""

    def __init__(self, path: Path | None, say: Callable[[str], None] = lambda _: None) -> None:
        """``path`` None keeps no log."""
        self._path = path
        self._say = say
        self._lock = threading.Lock()
        self._minute = 0
        self._refused = 0
        self.lost = 0

    def write(self, what: str, **facts: Any) -> None:
        """One line: time, ``what`` and ``facts``."""
        with self._lock:
            self._append(what, facts)

    def refused(self, why: str, **facts: Any) -> None:
        """A line about a request that was refused; texts from outside are cut, and a flood is counted."""
        with self._lock:
            minute = int(time.time() // 60)
            if minute != self._minute:
                left_out = self._refused - REFUSALS_PER_MINUTE
                if left_out > 0:
                    self._append("refused", {"why": "flood", "more": left_out})
                self._minute, self._refused = minute, 0
            self._refused += 1
            if self._refused <= REFUSALS_PER_MINUTE:
                self._append("refused", {"why": why, **{key: _cut(value) for key, value in facts.items()}})

    def _append(self, what: str, facts: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        row = {"time_unix_ns": time.time_ns(), "what": what, "user": os.getuid(), **facts}
        line = (json.dumps(row, ensure_ascii=True, default=str) + "\n").encode()
        try:
            make_private_folder(self._path.parent)
            handle = open_private(self._path, _APPENDING)
            try:
                if os.fstat(handle).st_size + len(line) > MOST_BYTES and _put_aside(self._path, handle):
                    # Opened before the other is closed: one that fails here is closed once, below.
                    old, handle = handle, open_private(self._path, _APPENDING)
                    os.close(old)
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                self._say(f"scope: {self._path} cannot be written, training goes on: {error}")


def _put_aside(path: Path, handle: int) -> bool:
    """Rename the file of ``handle`` to ``audit.jsonl.1``. False where another process is at it: two serve one
    run with ``scope open --here``, and the second rename would replace the old lines by the newest."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in BUSY:
            return False
        # Storage without locks: the look below is all there is.
    # Another process that has put it aside may not have begun the next one yet.
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            os.replace(path, path.with_name(path.name + ".1"))
    return True


def _cut(value: Any) -> Any:
    return value[:_LONGEST] if isinstance(value, str) else value
