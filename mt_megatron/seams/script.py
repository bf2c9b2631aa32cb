"""Observe how an unmodified script uses Megatron-Core: process groups, schedules, optimizer updates.

A process has at most one observer, which ``mt-megatron run --megascan`` or ``--megascope`` sets. Without it
the patched functions (``patches.events.script``) call upstream's after one check.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol


class Observer(Protocol):
    """Methods are called in the script's own thread, on every rank at the same point of the program."""

    def groups_made(self) -> None:
        """Megatron-Core's process groups exist, on all ranks; the observer may communicate."""

    def groups_end(self) -> None:
        """They are about to be destroyed."""

    def schedule(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``run``, a schedule, with the arguments of the script, and return what it does."""

    def update(self, optimizer: Any, step: Callable[[Any], Any]) -> Any:
        """Call ``step(optimizer)`` of a ``MegatronOptimizer`` and return what it does; optimizers of a chain
        are called within the chain's."""

    def gradients_ready(self, optimizer: Any) -> None:
        """Gradients of ``optimizer`` are reduced, unscaled and finite, not yet clipped."""

    def scheduled(self, scheduler: Any) -> None:
        """``scheduler``, an ``OptimizerParamScheduler``, has been made, loaded or moved on."""


observer: Observer | None = None


def observe(one: Observer | None) -> None:
    """Make ``one`` the observer of this process; None removes the present one."""
    global observer
    observer = one


# A child that is forked off (a data loader's worker) is no rank.
os.register_at_fork(after_in_child=lambda: observe(None))
