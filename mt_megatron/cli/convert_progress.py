"""How far ``mt-megatron convert`` is."""

from __future__ import annotations

import threading
import time

from mt_megatron.cli import progress


class ConsoleProgress(progress.ConsoleProgress):
    """Counts bytes from several threads."""

    command = "convert"

    def __init__(self, *, plain: bool | None = None) -> None:
        super().__init__(plain=plain)
        self._lock = threading.Lock()
        self._done = self._total = 0

    def expect(self, total: int) -> None:
        """So many bytes will be written."""
        self._total = total
        self.started = time.monotonic()

    def advance(self, count: int) -> None:
        """So many more are."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            rate = self.rate(now, self._done)
            done, total, rate = (each / progress.MB for each in (self._done, self._total, rate))
            self.show(now, self._done, self._total, f"{done:,.0f} of {total:,.0f} MB, {rate:,.0f} MB/s")
