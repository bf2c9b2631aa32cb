"""The control file of a run: what its ranks shall do, changed while they train.

    {"level": "full", "window": {"every": 100, "steps": 2, "level": "full"}, ...}

Each rank looks at it about once a second, in the background. What lay there when it started is of an
earlier run and is not obeyed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError, ScanError
from mt_megatron.scan.format.run_files import RunFiles, changing, write_private

logger = logging.getLogger("mt_megatron")

Callback = Callable[[Mapping[str, Any]], None]


def read_control(path: Path) -> dict[str, Any]:
    """The file's content; empty when there is none. Raises ``ScanError`` when it is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ScanError(
            f"{path} cannot be read ({error}); remove it, or write it with mt-megatron scan"
        ) from error
    if not isinstance(content, dict):
        raise ScanError(f"{path}: found {type(content).__name__}, expected a JSON object; remove it")
    return content


def change_control(files: RunFiles, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set these keys (None removes one) and leave the others; returns the new content.

    Two that change it at once wait for each other. Raises ``ScanError`` when it cannot be written.
    """
    try:
        with changing(files.control):
            content = {**read_control(files.control), **changes}
            content = {key: value for key, value in content.items() if value is not None}
            write_private(files.control, json.dumps(content) + "\n")
    except OSError as error:
        raise ScanError(
            f"{files.control} cannot be written: {error}; run this as the user who trains"
        ) from error
    return content


class ControlWatch:
    """Notices that the control file has changed; used by one thread."""

    def __init__(self, path: Path, apply: Callback) -> None:
        """``apply(content)`` takes over what belongs to the recorder and may raise ``ConfigError``."""
        self._path = path
        self._apply = apply
        self._seen = self._stamp()

    def look(self) -> None:
        """Read the file if it has changed, and pass it on. A wrong one is said and not obeyed."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            content = read_control(self._path)
            self._apply(content)
        except (ScanError, ConfigError) as error:
            logger.warning("the control file is not obeyed: %s", error)
            return

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
