"""One JSON record per report, each whole and on its way to the disk before training goes on.

Other places that keep records get the same ones; none of them can end the run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mt_megatron.checkpoint.file_locks import FileLock, is_own
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError


class Sink(Protocol):
    """A place that keeps records. Opening one may raise; that happens before the training."""

    title: str
    """What lines about it call it."""

    def record(self, event: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Keep one record, or raise whatever hinders it."""

    def close(self) -> None:
        """Finish what was kept."""


class Records:
    """Sends each record to all ``sinks``.

    A sink that fails is reported once, loudly, by ``say``, and asked again for every later record:
    a disk that was full may have room again. That is reported too, with the number of lost records.
    """

    def __init__(self, sinks: Sequence[Sink], say: Callable[[str], None]) -> None:
        self._sinks = tuple(sinks)
        self._say = say
        self._lost = [0] * len(self._sinks)

    def record(self, event: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Keep one record in every sink."""
        for index, sink in enumerate(self._sinks):
            try:
                sink.record(event, iteration, values)
            except Exception as error:  # noqa: BLE001 - whatever a logger raises, training goes on
                self._failed(index, f"the {event!r} record of step {iteration}", error)
            else:
                lost, self._lost[index] = self._lost[index], 0
                if lost:
                    self._say(f"{sink.title}: written again; {lost} record{'s' * (lost > 1)} missing")

    def close(self) -> None:
        """Finish every sink."""
        for index, sink in enumerate(self._sinks):
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - whatever a logger raises, training goes on
                self._failed(index, "the last records", error)

    def _failed(self, index: int, what: str, error: Exception) -> None:
        self._lost[index] += 1
        if self._lost[index] == 1:
            self._say(
                f"WARNING: {self._sinks[index].title}: {what} could not be written "
                f"({type(error).__name__}: {error}); training goes on"
            )


DEFAULT_NAME = "metrics.jsonl"
"""The file's name beside the checkpoints when ``metrics_path`` is not set."""


def metrics_path(config: TrainingConfig) -> Path | None:
    """Where ``config`` puts its records: ``metrics_path``, else beside the checkpoints; None when it
    names neither."""
    if config.logging.metrics_path is not None:
        return Path(config.logging.metrics_path)
    return None if config.checkpoint.save is None else Path(config.checkpoint.save) / DEFAULT_NAME


def run_name(config: TrainingConfig) -> str | None:
    """Name of the run's folder, where its records lie; None where none are kept."""
    path = metrics_path(config)
    return None if path is None else path.absolute().parent.name


class Metrics:
    """JSONL records, appended one by one; a file of None records nothing.

    Every record has ``event`` (``start``, ``train``, ``valid``, ``checkpoint``, ``end``), ``time``
    (seconds since the epoch) and ``iteration``. A record is one ``write`` of a whole line, so
    a kill leaves none half-written; what an earlier full disk cut off stays a line of its own.
    """

    title = "metrics"

    def __init__(self, path: Path | None) -> None:
        """Raises ``ConfigError`` where ``path`` cannot be written, or another process's run writes to it."""
        self.path = path
        self._file: int | None = None
        self._lock: FileLock | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            self._torn = _ends_within_a_line(self._file)
            # A pipe or a device takes the lines of many.
            self._lock = FileLock(path) if path.is_file() else None
        except OSError as error:
            raise ConfigError(f"cannot append to {path}: {error.strerror}; change --metrics-path") from error
        # A run of this process that failed may not have closed it.
        if self._lock is not None and self._lock.state == "busy" and not is_own(path):
            self.close()
            raise ConfigError(
                f"another run writes its records to {path}; expected a folder of its own for each run. Set "
                "--metrics-path to a file in another one, or end that run first"
            )

    @property
    def unlocked(self) -> str | None:
        """Reason why nothing keeps a second run from writing to it; None where the lock does."""
        return self._lock.reason if self._lock is not None and self._lock.state == "unsupported" else None

    def record(self, event: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Append one record. Numbers that JSON cannot hold (NaN, infinity) become null.

        Raises ``OSError`` when it could not be written, or not as a whole.
        """
        if self._file is None:
            return
        record = {"event": event, "time": round(time.time(), 3), "iteration": iteration, **values}
        line = (json.dumps(finite(record)) + "\n").encode()
        rest = b"\n" + line if self._torn else line
        self._torn = True
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        if self._lock is not None:
            self._lock.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of ``path``, in order; a line that a full disk cut off is left out.

    Raises ``OSError`` when the file cannot be read.
    """
    found = []
    with path.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "event" in record and "iteration" in record:
                found.append(record)
    return found


def finite(value: Any) -> Any:
    """``value`` with every number that JSON cannot hold replaced by None."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def perplexity(loss: float) -> float:
    """``exp(loss)``; infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def _ends_within_a_line(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"
