"""What a run says: one rank's progress display, and one JSON record per report."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from mt_megatron.errors import ConfigError


class Metrics:
    """JSONL records, appended and flushed one by one; a file of None records nothing.

    Every record has ``event`` (``start``, ``train``, ``valid``, ``checkpoint``, ``end``), ``time``
    (seconds since the epoch) and ``iteration``.
    """

    def __init__(self, path: Path | None) -> None:
        self._stream: TextIO | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._stream = open(path, "a", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise ConfigError(
                    f"cannot append to {path}: {error.strerror}; change --metrics-path"
                ) from error

    def record(self, event: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Append one record. Numbers that JSON cannot hold (NaN, infinity) become null."""
        if self._stream is None:
            return
        record = {"event": event, "time": round(time.time(), 3), "iteration": iteration, **values}
        self._stream.write(json.dumps({k: _finite(v) for k, v in record.items()}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()


class Display:
    """Lines for a person. On a terminal the newest step overwrites the one before; elsewhere, and for
    everything that is not a step, each line stays."""

    def __init__(self, train_iters: int, *, enabled: bool, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._enabled = enabled
        self._live = enabled and self._stream.isatty()
        self._train_iters = train_iters
        self._width = 0

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._enabled:
            self._clear()
            print(line, file=self._stream, flush=True)

    def step(self, iteration: int, values: Mapping[str, Any]) -> None:
        """The state after ``iteration``; ``values`` are those of the JSON record."""
        if not self._enabled:
            return
        line = format_step(iteration, self._train_iters, values)
        if not self._live:
            print(line, file=self._stream, flush=True)
            return
        self._clear()
        self._stream.write(line)
        self._stream.flush()
        self._width = len(line)

    def close(self) -> None:
        """Leave the newest step's line standing."""
        if self._width:
            self._stream.write("\n")
            self._width = 0

    def _clear(self) -> None:
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0


def format_step(iteration: int, train_iters: int, values: Mapping[str, Any]) -> str:
    """One step as text, with the time the rest will take."""
    norm = values["grad_norm"]
    parts = [
        f"step {iteration:>{len(str(train_iters))}}/{train_iters}",
        f"loss {values['loss']:.4f}",
        f"lr {values['lr']:.3g}",
        "grad norm " + ("-" if norm is None else f"{norm:.3f}"),
        f"{values['tokens_per_second']:,.0f} tokens/s",
        f"{duration((train_iters - iteration) * values['step_seconds'])} left",
    ]
    if values["skipped_iterations"]:
        parts.append(f"{values['skipped_iterations']} skipped")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def perplexity(loss: float) -> float:
    """``exp(loss)``; infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
