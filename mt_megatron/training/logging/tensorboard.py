"""The records of a run as TensorBoard scalars, through torch's own writer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.errors import ConfigError
from mt_megatron.training.logging.moe_metrics import histograms, scalars

MISSING = (
    "tensorboard_dir is set, and the package tensorboard is not installed. Install it with "
    '`pip install "mt_megatron[tensorboard]"`, or leave --tensorboard-dir out'
)

_EVENTS = ("train", "valid")


class TensorBoard:
    """Every number of ``train`` and ``valid`` records as ``train/NAME`` or ``valid/NAME`` at its step, those
    of layers with experts below ``train/moe``; the configuration as the text ``config``.

    Written and flushed at every record: a killed run leaves what it had reported.
    """

    title = "TensorBoard"

    def __init__(self, folder: Path, *, config_yaml: str) -> None:
        """Raises ``ConfigError`` when the package is missing or the folder cannot be written to."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"{MISSING} ({error})") from error
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer: Any = SummaryWriter(str(folder))
            self._writer.add_text("config", f"```yaml\n{config_yaml}```", 0)
            self._writer.flush()
        except OSError as error:
            raise ConfigError(
                f"cannot write to the TensorBoard folder {folder}: {error.strerror or error}; change "
                "--tensorboard-dir"
            ) from error

    def record(self, event: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Keep the numbers of one record. Raises what the writer raises.

        A run that goes on marks what an earlier one had written beyond this step as replaced.
        """
        if event == "start" and iteration > 0:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            restarted = Event(step=iteration + 1, session_log=SessionLog(status=SessionLog.START))
            self._writer.file_writer.add_event(restarted, iteration + 1)
        if event not in _EVENTS:
            return
        for name, value in {**values, **scalars(values)}.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(f"{event}/{name}", value, iteration)
        for name, counts in histograms(values).items():
            self._writer.add_histogram(f"{event}/{name}", np.array(counts), iteration)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
