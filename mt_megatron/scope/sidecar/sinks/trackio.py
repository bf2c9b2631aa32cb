"""Trackio: the recording's numbers in its local database (TRACKIO_DIR says where)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Sink


class TrackioSink:
    """Numbers as ``scope/STATISTIC/MODULE`` at their step."""

    title = "trackio"

    def __init__(self, project: str, run: Path) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=project,
            name=f"{run.resolve().name}-scope",
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """One row of the run's history."""
        self._run.log({f"scope/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_sink(argument: str, run: Path) -> Sink:
    """``argument``: the project."""
    return TrackioSink(argument, run)
