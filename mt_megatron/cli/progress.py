"""How far a command is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TypeVar

_LINE_SECONDS = 10.0
MB = 1e6

ProgressT = TypeVar("ProgressT", bound="ConsoleProgress")


class ConsoleProgress:
    """Writes to stderr, so that ``--json`` has stdout to itself."""

    command = ""
    """What begins every line."""

    def __init__(self, *, plain: bool | None = None) -> None:
        """``plain``: lines instead of a bar; None: unless stderr is a terminal."""
        self.started = self._told = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        if not (plain if plain is not None else not sys.stderr.isatty()):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn(self.command),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}% {task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                # The result follows it, or an error: it would say 0 % where nothing was left to do.
                transient=True,
            )

    def __enter__(self: ProgressT) -> ProgressT:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.command, total=None, figures="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def has_bar(self) -> bool:
        """Whether there is a bar, above which lines have to go through ``say``."""
        return self._bar is not None

    def say(self, line: str) -> None:
        """One line for a person, above the bar."""
        if self._bar is not None:
            self._bar.console.print(f"{self.command}: {line}", markup=False, highlight=False, soft_wrap=True)
        else:
            print(f"{self.command}: {line}", file=sys.stderr, flush=True)

    def show(self, now: float, done: int, total: int, figures: str) -> None:
        """``done`` of ``total`` at ``now``, and what else there is to say of it."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, figures=figures)
        elif now - self._told >= _LINE_SECONDS:
            self._told = now
            self.say(f"{min(1.0, done / max(1, total)):.0%}, {figures}")

    def rate(self, now: float, count: int) -> float:
        """``count`` for each second since the work began."""
        return count / max(1e-9, now - self.started)
