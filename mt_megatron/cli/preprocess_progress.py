"""How far ``mt-megatron preprocess`` is."""

from __future__ import annotations

import time

from mt_megatron.cli import progress


class ConsoleProgress(progress.ConsoleProgress):
    """Documents, tokens and megabytes of input."""

    command = "preprocess"
    _first: int | None = None

    def advance(self, done_bytes: int, total_bytes: int, documents: int, tokens: int) -> None:
        """Show how much of the input is done, and at which rate since this process began."""
        if self._first is None:
            self._first = done_bytes
        now = time.monotonic()
        rate = self.rate(now, done_bytes - self._first) / progress.MB
        figures = f"{documents:,} documents, {tokens:,} tokens, {rate:.1f} MB/s"
        self.show(now, done_bytes, total_bytes, figures)
