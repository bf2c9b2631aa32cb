"""Checks of how checkpoints are written and kept."""

from __future__ import annotations

from mt_megatron.config.model_change import override_problems
from mt_megatron.config.schema import TrainingConfig


def checkpoint_problems(config: TrainingConfig) -> list[str]:
    """One line per problem: found, expected, what to change."""
    return [*_kept(config), *_without_a_folder(config), *override_problems(config)]


def _kept(config: TrainingConfig) -> list[str]:
    options = config.checkpoint
    counts = {
        "save_keep_last": options.save_keep_last,
        "save_retain_interval": options.save_retain_interval,
    }
    return [
        f"{name} is {count}; expected at least 1. Set --{name.replace('_', '-')}."
        for name, count in counts.items()
        if count is not None and count < 1
    ]


def _without_a_folder(config: TrainingConfig) -> list[str]:
    options = config.checkpoint
    if options.save is not None:
        return []
    used = {
        "async_save": options.async_save,
        "save_keep_last": options.save_keep_last is not None,
        "save_retain_interval": options.save_retain_interval is not None,
    }
    return [f"{name} is set without save; expected a directory. Set --save." for name in used if used[name]]
