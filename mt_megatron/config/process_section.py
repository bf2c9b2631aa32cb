"""What a run keeps and says, and how its process behaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept, and where a run starts."""

    save: str | None = None
    """Directory to write checkpoints to. None: none are written."""

    save_interval: int | None = None
    """Write one every so many steps. None: ``save_interval_in_mins`` decides."""

    save_interval_in_mins: float | None = None
    """Write one every so many minutes; 0: never by the clock. None: 30 when ``save_interval`` is not set."""

    load: str | None = None
    """Directory to start from when ``resume`` finds nothing in ``save``; it must hold a checkpoint."""

    init_from_hf: str | None = None
    """Folder in Hugging Face's form (config.json, safetensors) to start from when ``resume`` finds nothing in
    ``save``; excludes ``load``."""

    allow_function_change: tuple[str, ...] = ()
    """Options that change what the same weights compute and may differ from those of the checkpoint or of the
    Hugging Face folder that a run starts from. Any other difference of the model is an error."""

    resume: str = "auto"
    """``auto``: continue from the newest checkpoint in ``save`` if there is one. ``never``: start
    anew. Anything else is the directory of the checkpoint to continue from."""

    save_over_others: bool = False
    """Whether ``--resume never`` may start in a ``save`` that holds another run's checkpoints, and replace
    them. Otherwise that is an error."""

    resume_skip_damaged: bool = False
    """Whether ``--resume auto`` continues from the newest whole checkpoint when the newest one is
    damaged. Otherwise that ends the run, and the error names the whole one."""

    verify_checkpoint: bool = True
    """Whether the checksum of every file is compared before a checkpoint is loaded."""

    async_save: bool = False
    """Whether files are written in the background, from a copy in host memory, while training goes
    on. The last checkpoint of a run is waited for either way."""

    save_keep_last: int | None = None
    """How many checkpoints to keep, counted from the newest. None: all, or 1 with
    ``save_retain_interval``."""

    save_retain_interval: int | None = None
    """Keep checkpoints of steps that this divides for good. None: ``save_keep_last`` alone decides."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run says about itself."""

    log_interval: int = 100
    """Report every so many steps."""

    metrics_path: str | None = None
    """JSONL file that rank 0 appends one record per report to. None: ``metrics.jsonl`` in ``save``."""

    display: Literal["auto", "panel", "plain"] = "auto"
    """What rank 0 shows. auto: a panel that is redrawn on a terminal, plain lines elsewhere."""

    peak_tflops: float | None = None
    """Dense peak of one device in 1e12 operations per second, which MFU is measured against. None: the
    backend's table for the parameters' dtype."""

    tensorboard_dir: str | None = None
    """Directory that rank 0 writes TensorBoard event files to. None: none are written."""

    wandb_project: str | None = None
    """Weights & Biases project that rank 0 logs to. None: none. Offline unless a key or WANDB_MODE is set."""

    wandb_exp_name: str | None = None
    """Name of the run there. None: the name of the ``save`` directory, else one that wandb makes up."""

    wandb_save_dir: str | None = None
    """Directory for its files. None: ``save``, else the current directory."""

    config_logger_dir: str = ""
    """Directory that Megatron-Core dumps its configurations to. Empty: off."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How the process itself runs. Processes are started by torchrun."""

    backend: str = "auto"
    """``auto``, or the name of a backend (``cpu``, ``cuda``, ``musa``)."""

    distributed_timeout_minutes: float = 10.0
    """How long a collective may take before the run is given up."""

    watchdog_seconds: float = 300.0
    """How long a rank may show no progress within a step before every rank says where it is and ends; 0: for
    ever. Saving, validation and the first step are not limited."""

    cpu_threads: int | None = None
    """Threads of each process on the cpu backend. None: OMP_NUM_THREADS if it was set, else the cores of
    this node shared out among its processes."""

    strict: bool = False
    """Whether a fallback is an error instead of one log line."""

    check_memory: bool = True
    """Whether a model whose weights, gradients and optimizer state alone exceed the device's memory is an
    error before the start, instead of one log line."""

    print_config: bool = False
    """Print the whole configuration as YAML and stop."""
