"""TensorBoard event files, written with the package tensorboard alone: the sidecar imports no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Sink


class TensorBoardSink:
    """Scalars ``scope/STATISTIC/MODULE`` and ``scope/run/NAME`` at their step."""

    title = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = event_pb2.Event
        self._session: Any = event_pb2.SessionLog
        self._last: int | None = None
        self._summary: Any = summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = EventFileWriter(str(folder), filename_suffix=".scope")

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write and flush: a killed sidecar leaves what it had written. A run that resumes or goes back
        begins with a mark that what was written from its step on is replaced."""
        if any(name.startswith("run/") for name in numbers):
            if self._last is None or step <= self._last:
                start = self._session(status=self._session.START)
                self._writer.add_event(self._event(wall_time=time.time(), step=step, session_log=start))
            self._last = step
        values = [
            self._summary.Value(tag=f"scope/{name}", simple_value=value) for name, value in numbers.items()
        ]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        )
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


def open_sink(argument: str, run: Path) -> Sink:
    """``argument``: the folder; relative ones lie in the run's."""
    return TensorBoardSink(run / argument)
