"""``RUN/scope/audit.jsonl``: who opened the page, what was refused, what was commanded."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint.file_locks import BUSY

MOST_BYTES = 8 * 2**20
"""Of the file; the one before it is kept as ``audit.jsonl.1``."""

REFUSALS_PER_MINUTE = 60
"""Refusals that are written; of the rest the number is."""

UNWRITTEN = frozenset({"hold", "status"})
"""Commands without a line: an open page repeats them, and they change nothing but how long a pause lasts."""

_LONGEST = 200
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Audit:
    """Appends lines of JSON. A file that cannot be written costs the line and nothing else: ``lost`` counts
    them."""

    def __init__(self, path: Path | None) -> None:
        """``path`` None keeps no log."""
        self._path = path
        self._lock = threading.Lock()
        self._minute = 0
        self._refused = 0
        self.lost = 0

    def write(self, what: str, **facts: Any) -> None:
        """One line: time, ``what`` and ``facts``."""
        with self._lock:
            self._append({"time": time.time(), "what": what, **facts})

    def refused(self, why: str, **facts: Any) -> None:
        """A line about a request that was refused; texts from outside are cut, and a flood is counted."""
        with self._lock:
            minute = int(time.time() // 60)
            if minute != self._minute:
                left_out = self._refused - REFUSALS_PER_MINUTE
                if left_out > 0:
                    self._append({"time": time.time(), "what": "refused", "why": "flood", "more": left_out})
                self._minute, self._refused = minute, 0
            self._refused += 1
            if self._refused <= REFUSALS_PER_MINUTE:
                shown = {key: _cut(value) for key, value in facts.items()}
                self._append({"time": time.time(), "what": "refused", "why": why, **shown})

    def _append(self, row: dict[str, Any]) -> None:
        if self._path is None:
            return
        line = (json.dumps(row, ensure_ascii=True, default=str) + "\n").encode()
        try:
            handle = os.open(self._path, _APPENDING, 0o600)
            try:
                if os.fstat(handle).st_size + len(line) > MOST_BYTES and _put_aside(self._path, handle):
                    # Opened before the other is closed: one that fails here is closed once, below.
                    old, handle = handle, os.open(self._path, _APPENDING, 0o600)
                    os.close(old)
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError:
            self.lost += 1


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
