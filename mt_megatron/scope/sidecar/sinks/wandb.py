"""Weights & Biases: a run of its own for the recording, offline unless WANDB_MODE or a key says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Sink


class WandbSink:
    """Numbers as ``scope/STATISTIC/MODULE`` against ``iteration``."""

    title = "wandb"

    def __init__(self, project: str, run: Path) -> None:
        import wandb

        chosen = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY")
        self._run: Any = wandb.init(
            project=project,
            name=f"{run.resolve().name}-scope",
            group=run.resolve().name,
            dir=str(run),
            # None: wandb reads WANDB_MODE itself.
            mode=None if chosen else "offline",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("scope/*", step_metric="iteration")

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """One row of the run's history."""
        self._run.log({"iteration": step, **{f"scope/{name}": value for name, value in numbers.items()}})

    def close(self) -> None:
        """Finish the run; online, waits until it is sent."""
        self._run.finish()


def open_sink(argument: str, run: Path) -> Sink:
    """``argument``: the project."""
    return WandbSink(argument, run)
