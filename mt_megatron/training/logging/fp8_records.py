"""FP8 telemetry of a run on disk: one file for each pipeline stage, beside the metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.fp8.kernels import TEXT
from mt_megatron.fp8.state import Fp8State, states_of
from mt_megatron.planning.fp8_report import fp8_report
from mt_megatron.training.distributed import Job
from mt_megatron.training.logging.metrics import finite, metrics_path


def telemetry_path(metrics: Path, stage: int) -> Path:
    """The file of a pipeline stage."""
    return metrics.with_name(f"{metrics.stem}.fp8.stage{stage}.jsonl")


def telemetry_files(metrics: Path) -> list[Path]:
    """The files of all stages of a run."""
    return sorted(metrics.parent.glob(f"{metrics.stem}.fp8.stage*.jsonl"))


class Fp8Records:
    """Writes what the first rank of each stage measured; a disk that fails is reported once."""

    def __init__(self, config: TrainingConfig, job: Job, chunks: Any, say: Callable[[str], None]) -> None:
        self._say, self._lost = say, False
        path = metrics_path(config)
        at = job.at
        self._path = None if path is None or at.tp or at.dp or at.cp else telemetry_path(path, at.pp)
        states = states_of(chunks)
        if states:
            how = TEXT[states[0].kernels]
            share = fp8_report(config)["share"]
            say(
                f"FP8: recipe {states[0].recipe.name}, {how}; {share:.1%} of the operations of the decoder's "
                "linears (mt-megatron fp8 report)"
            )
        for state in states:
            if job.is_main:
                state.announce = say  # which other stages have none of
            state.options = _seeded(state, config.train.seed)
            if state.telemetry is not None and self._path is not None:
                state.telemetry.write = self._write

    def _write(self, record: dict[str, Any]) -> None:
        assert self._path is not None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            line = (json.dumps(finite(record)) + "\n").encode()
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            if not self._lost:
                self._say(f"WARNING: FP8 telemetry: {self._path}: {error.strerror}; training goes on")
            self._lost = True


def _seeded(state: Fp8State, seed: int) -> Any:
    from dataclasses import replace

    return replace(state.options, seed=seed)
