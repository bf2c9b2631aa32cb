"""How far a conversion is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

_LINE_SECONDS = 10.0
_MB = 1e6


class ConsoleProgress:
    """Counts bytes from several threads. Writes to stderr, so that ``--json`` has stdout to itself."""

    def __init__(self, *, plain: bool | None = None) -> None:
        """``plain``: lines instead of a bar; None: unless stderr is a terminal."""
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._started = self._told = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        if not (plain if plain is not None else not sys.stderr.isatty()):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("convert"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}% {task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )

    def __enter__(self) -> ConsoleProgress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("convert", total=None, figures="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """One line for a person, above the bar."""
        if self._bar is not None:
            self._bar.console.print(f"convert: {line}", markup=False, highlight=False, soft_wrap=True)
        else:
            print(f"convert: {line}", file=sys.stderr, flush=True)

    def expect(self, total: int) -> None:
        """So many bytes will be written."""
        self._total = total
        self._started = self._told = time.monotonic()

    def advance(self, count: int) -> None:
        """So many more are."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            rate = self._done / max(1e-9, now - self._started) / _MB
            figures = f"{self._done / _MB:,.0f} of {self._total / _MB:,.0f} MB, {rate:,.0f} MB/s"
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done, total=self._total, figures=figures)
            elif now - self._told >= _LINE_SECONDS:
                self._told = now
                self.say(f"{min(1.0, self._done / max(1, self._total)):.0%}, {figures}")
