"""What can be done with a run that has ended: commands to copy."""

from __future__ import annotations

import shlex
from pathlib import Path

from mt_megatron.config.schema import TrainingConfig

_PUBLISHED = ("llama", "mixtral", "deepseek", "qwen")
"""Families that ``mt-megatron convert --to-hf`` knows."""


def next_lines(
    config: TrainingConfig, iteration: int, checkpoint: Path | None, trace: Path | None
) -> list[str]:
    """Where the ``trace`` lies, and one line per possibility, each beginning with ``next:``."""
    lines = [] if trace is None else [f"trace: {trace}"]
    save = config.checkpoint.save
    if checkpoint is not None and save is not None:
        total = config.train.train_iters
        # Any other --resume than auto does at the next start what it did at this one.
        automatic = config.checkpoint.resume == "auto"
        if total is not None and iteration < total:
            how = "" if automatic else " with --resume auto"
            lines.append(f"next: the same command{how} goes on from step {iteration}")
        else:
            how = "" if automatic else "--resume auto and "
            lines.append(f"next: the same command with {how}a larger --train-iters trains on")
        if config.model.family in _PUBLISHED:
            # A run without a step of its own has nothing in --save: its checkpoint is the one it began from.
            folder = shlex.quote(str(save if checkpoint.parent == Path(save) else checkpoint))
            lines.append(
                f"next: mt-megatron convert --from-megatron {folder} --to-hf FOLDER  (for transformers, vLLM)"
            )
    if trace is not None:
        lines.append(f"next: mt-megatron scan report {shlex.quote(str(trace))}  (what held the run up)")
    return lines
