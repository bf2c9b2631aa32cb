"""Every check that needs no process group; all problems are reported at once."""

from __future__ import annotations

from mt_megatron.errors import ConfigError
from mt_megatron.training.config import TrainingConfig
from mt_megatron.training.validate_backend import backend_problems
from mt_megatron.training.validate_checkpoint import checkpoint_problems
from mt_megatron.training.validate_experts import expert_problems
from mt_megatron.training.validate_files import file_problems
from mt_megatron.training.validate_model import model_problems
from mt_megatron.training.validate_parallel import parallel_problems
from mt_megatron.training.validate_rampup import rampup_problems
from mt_megatron.training.validate_scan import scan_problems
from mt_megatron.training.validate_sizes import size_problems
from mt_megatron.training.validate_supported import support_problems
from mt_megatron.training.validate_train import train_problems


def validate(config: TrainingConfig, *, world_size: int = 1, check_files: bool = True) -> None:
    """Check ``config`` for a run of ``world_size`` processes.

    ``check_files=False`` leaves out the existence of data, tokenizer and checkpoints, for a
    configuration that is checked on another machine than the one it runs on.

    Raises ``ConfigError`` with one line per problem: found, expected, what to change.
    """
    found = problems(config, world_size=world_size, check_files=check_files)
    if found:
        count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
        raise ConfigError(f"the configuration has {count}:\n" + "\n".join(f"- {line}" for line in found))


def problems(config: TrainingConfig, *, world_size: int = 1, check_files: bool = True) -> list[str]:
    """What ``validate`` would raise, one line per problem; empty when all is well."""
    too_large = size_problems(config)
    if too_large:
        # What follows computes with these numbers.
        return too_large
    return [
        *support_problems(config),
        *model_problems(config),
        *parallel_problems(config, world_size),
        *expert_problems(config, world_size),
        *train_problems(config),
        *checkpoint_problems(config),
        *rampup_problems(config, world_size),
        *scan_problems(config),
        *([*backend_problems(config), *file_problems(config)] if check_files else []),
    ]
