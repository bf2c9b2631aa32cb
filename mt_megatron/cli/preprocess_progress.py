"""How far ``mt-megatron preprocess`` is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_LINE_SECONDS = 10.0
_MB = 1e6


class ConsoleProgress:
    """Writes to stderr, so that ``--json`` has stdout to itself."""

    def __init__(self, *, plain: bool | None = None) -> None:
        """``plain``: lines instead of a bar; None: unless stderr is a terminal."""
        self._bar: Any = None
        self._task: Any = None
        self._started = self._told = time.monotonic()
        self._first: int | None = None
        if not (plain if plain is not None else not sys.stderr.isatty()):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("preprocess"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}% {task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )

    def __enter__(self) -> ConsoleProgress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("preprocess", total=None, figures="")
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
            self._bar.console.print(f"preprocess: {line}", markup=False, highlight=False, soft_wrap=True)
        else:
            print(f"preprocess: {line}", file=sys.stderr, flush=True)

    def advance(self, done_bytes: int, total_bytes: int, documents: int, tokens: int) -> None:
        """Show how much of the input is done, and at which rate since this process began."""
        now = time.monotonic()
        if self._first is None:
            self._first = done_bytes
        rate = (done_bytes - self._first) / max(1e-9, now - self._started) / _MB
        figures = f"{documents:,} documents, {tokens:,} tokens, {rate:.1f} MB/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes, figures=figures)
        elif now - self._told >= _LINE_SECONDS:
            self._told = now
            self.say(f"{min(1.0, done_bytes / max(1, total_bytes)):.0%}, {figures}")
