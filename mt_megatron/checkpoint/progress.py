"""How far a run is: what a checkpoint says beside the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    iteration: int = 0
    """Steps done."""

    consumed_samples: int = 0
    """Training samples used, over all ranks."""

    consumed_tokens: int = 0
    """Tokens that counted towards the loss."""

    skipped_iterations: int = 0
    """Steps without an update, and steps that a rollback undid."""

    divergences: int = 0
    """Steps that diverged."""

    loss_mean: float = 0.0
    """Running mean of the loss, which a spike is measured against."""

    loss_mean_steps: int = 0
    """How many steps are in it."""


def progress_from(stored: Mapping[str, Any]) -> Progress:
    """The progress in a manifest; what an older or newer version did not write starts at its default."""
    known = {field.name for field in dataclasses.fields(Progress)}
    return Progress(**{name: value for name, value in stored.items() if name in known})
