"""The audit log RUN/scope/audit.jsonl: who changed what and when, an object a line, written by rank 0."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "audit.jsonl"


class Audit:
    """Appends lines, each in one write; where the file cannot be written it says so once."""

    def __init__(self, folder: Path | None, say: Any) -> None:
        """``folder``: RUN/scope, None: nothing is written."""
        self._path = None if folder is None else folder / NAME
        self._say = say
        self._failed = False

    def note(self, what: str, step: int, **values: Any) -> None:
        """One event: ``what`` happened after ``step``."""
        if self._path is None:
            return
        record = {"time_unix": time.time(), "what": what, "step": step, "user": os.getuid(), **values}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(
                self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            try:
                os.write(handle, (json.dumps(record, default=str) + "\n").encode())
            finally:
                os.close(handle)
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._say(f"scope: {self._path} cannot be written, training goes on: {error}")


def read_audit(folder: Path) -> list[Mapping[str, Any]]:
    """The lines of RUN/scope/audit.jsonl; what is no JSON object is left out."""
    try:
        lines = (folder / NAME).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[Mapping[str, Any]] = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
