"""The records of a run as a Weights & Biases run; offline unless somebody said otherwise."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.training.logging.metrics import finite, run_name
from mt_megatron.training.logging.moe_metrics import LAYERS, scalars

MISSING = (
    "wandb_project is set, and the package wandb is not installed. Install it with "
    '`pip install "mt_megatron[wandb]"`, or leave --wandb-project out'
)

_HOST = "api.wandb.ai"
_LOGGED = ("train", "valid")


def chosen_mode(environment: Mapping[str, str]) -> tuple[Any, str]:
    """wandb's mode and why: ``WANDB_MODE`` decides (None: wandb reads it), then whether there is a key."""
    if environment.get("WANDB_MODE"):
        return None, f"WANDB_MODE={environment['WANDB_MODE']}"
    if environment.get("WANDB_API_KEY"):
        return "online", "WANDB_API_KEY is set"
    if _logged_in(environment):
        return "online", "a key is in the netrc file"
    return "offline", "no API key; send it later with `wandb sync`"


def _logged_in(environment: Mapping[str, str]) -> bool:
    path = environment.get("NETRC") or os.path.join(environment.get("HOME", ""), ".netrc")
    try:
        return netrc.netrc(path).authenticators(_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WeightsAndBiases:
    """``train`` and ``valid`` records as ``train/NAME`` and ``valid/NAME``, the last record as the
    run's summary, the configuration as its config."""

    title = "wandb"

    def __init__(self, config: TrainingConfig) -> None:
        """Raises ``ConfigError`` when the package is missing or the run cannot be started."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(f"{MISSING} ({error})") from error
        logging = config.logging
        folder = Path(logging.wandb_save_dir or config.checkpoint.save or ".")
        mode, self.reason = chosen_mode(os.environ)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._run: Any = wandb.init(
                project=logging.wandb_project,
                name=logging.wandb_exp_name or run_name(config),
                dir=str(folder),
                mode=mode,
                config=config.to_show().to_dict(),
                settings=wandb.Settings(console="off", silent=True),
            )
        except (OSError, wandb.errors.Error) as error:
            raise ConfigError(
                f"cannot start a wandb run in {folder}: {error}; change --wandb-save-dir, set "
                "WANDB_MODE=offline, or leave --wandb-project out"
            ) from error
        self.folder = self._run.dir
        for event in _LOGGED:
            self._run.define_metric(f"{event}/*", step_metric="iteration")

    def record(self, event: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Keep one record. Raises what wandb raises."""
        values = finite(values)
        if event in _LOGGED:
            numbers = {**values, **scalars(values)}
            numbers.pop(LAYERS, None)
            found = {f"{event}/{name}": value for name, value in numbers.items() if value is not None}
            self._run.log({"iteration": iteration, **found})
        elif event == "end":
            self._run.summary.update({name: value for name, value in values.items() if value is not None})

    def close(self) -> None:
        """Finish the run; online, waits until it is sent."""
        self._run.finish()
