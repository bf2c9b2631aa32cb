"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mt_megatron.checkpoint.progress import Progress
from mt_megatron.training.evaluate import Validation


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    progress: Progress
    finished: bool
    """Whether all of ``train_iters`` are done."""

    loss: float | None
    """Training loss of the last step of this run; None when it made none."""

    validation: Validation | None
    """The last validation; None when there was none."""

    checkpoint: Path | None
    """The newest checkpoint; None when none is written."""

    straggler: bool = False
    """Whether the run ended because a straggler was confirmed; its host is on the list of excluded ones."""
