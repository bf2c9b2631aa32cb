"""The last lines of a terminal, drawn again and again, while whatever is printed goes above them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

Render = Callable[[int, int], tuple[str, int]]
"""(columns, rows of the terminal) -> text without a final line break, and the columns of its widest line."""

_SECONDS_BETWEEN = 1.0


def can_be_redrawn(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that understands cursor movements."""
    try:
        terminal = stream.isatty()
    except ValueError:
        return False
    return terminal and os.environ.get("TERM", "") not in ("", "dumb")


class LiveRegion:
    """A region below everything else that is printed.

    While it is open ``sys.stdout``, ``sys.stderr`` and the root logger's handlers write above
    it, line by line. What goes to the terminal past Python (a library's C code, a child process)
    lands below and may leave a copy of the region behind; it never breaks the run. No thread draws:
    loader processes are forked while this is open, and a thread's lock could be copied locked.
    """

    def __init__(
        self, stream: TextIO, render: Render, *, size: Callable[[], tuple[int, int]] | None = None
    ) -> None:
        self._stream = stream
        self._render = render
        self._size = size if size is not None else self._terminal_size
        self._lock = threading.RLock()
        self._lines = 0
        self._width = 0
        self._columns = 0
        self._drawn_at = 0.0
        self._open = True
        self._undo = contextlib.ExitStack()
        self._divert()

    def draw_if_due(self) -> None:
        """Draw unless it was drawn a moment ago."""
        if time.monotonic() - self._drawn_at >= _SECONDS_BETWEEN:
            self.draw()

    def draw(self) -> None:
        """Draw it as it is now."""
        self._put("")

    def print(self, text: str) -> None:
        """``text``, whole lines, above the region; they stay."""
        self._put(text)

    def close(self) -> None:
        """Draw it a last time, leave it standing, and give the streams back."""
        self.draw()
        self._open = False
        self._undo.close()

    def _put(self, above: str) -> None:
        with self._lock:
            if not self._open:
                return
            columns, rows = self._size()
            body, width = self._render(columns, rows)
            text = self._clear(columns, rows) + above + body + "\n"
            self._lines, self._width, self._columns = body.count("\n") + 1, width, columns
            self._drawn_at = time.monotonic()
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                # The terminal is gone, the run is not.
                self._open = False
                self._undo.close()

    def _clear(self, columns: int, rows: int) -> str:
        """Cursor to where the region began, and everything below removed."""
        if not self._lines:
            return ""
        # A terminal that became narrower has broken each of our lines into several.
        per_line = -(-self._width // columns) if columns < self._columns else 1
        up = min(self._lines * max(1, per_line), rows - 1)
        # Not all at once: cleared from its first cell on, a screen may be kept in the scrollback.
        return f"\r\x1b[{up}A\x1b[K\x1b[1B\x1b[J\x1b[1A"

    def _terminal_size(self) -> tuple[int, int]:
        try:
            found = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            found = shutil.get_terminal_size()
        # Some terminals say 0 x 0 while they start.
        return max(1, found.columns or 80), max(1, found.lines or 24)

    def _divert(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not self._stream and not can_be_redrawn(stream):
                continue
            above = _Above(stream, self)
            setattr(sys, name, above)
            self._undo.callback(_give_back, name, above, stream)
            for handler in logging.root.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                    handler.setStream(above)
                    self._undo.callback(handler.setStream, stream)


def _give_back(name: str, above: _Above, stream: TextIO) -> None:
    above.finish()
    if getattr(sys, name) is above:
        setattr(sys, name, stream)


class _Above:
    """A stream whose whole lines appear above the region; the rest of a line waits for its end."""

    def __init__(self, stream: TextIO, region: LiveRegion) -> None:
        self._stream = stream
        self._region = region
        self._pending = ""
        self._process = os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._process:
            # A forked child has no region of its own.
            return self._stream.write(text)
        whole, newline, self._pending = (self._pending + text).rpartition("\n")
        if newline:
            self._region.print(whole + newline)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Write what never became a line."""
        if self._pending:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(self._pending + "\n")
            self._pending = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
