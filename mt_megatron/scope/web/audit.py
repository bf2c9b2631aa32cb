"""``RUN/scope/audit.jsonl``: who opened the page, what was refused, what was commanded."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

MOST_BYTES = 8 * 2**20
"""Of the file; the one before it is kept as ``audit.jsonl.1``."""

REFUSALS_PER_MINUTE = 60
"""Refusals that are written; of the rest the number is."""

UNWRITTEN = frozenset({"hold", "status"})
"""Commands without a line: an open page repeats them, and they change nothing but how long a pause lasts."""

_LONGEST = 200


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
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_size + len(line) > MOST_BYTES:
                    os.replace(self._path, self._path.with_name(self._path.name + ".1"))
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(self._path, flags, 0o600)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError:
            self.lost += 1


def _cut(value: Any) -> Any:
    return value[:_LONGEST] if isinstance(value, str) else value
