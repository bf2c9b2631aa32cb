"""Forward passes of a router: which count, each micro-batch of training once, and which get losses attached.

Tokens for the bias, losses for the tracker and figures for the log must not count a pass that is only
there to be recomputed, nor evaluation. The losses' gradients hang on every pass that autograd records:
torch's checkpointing runs forward twice and takes the second pass's tensors for the first's graph, so both
have to save the same ones; backward goes through one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass."""

    batch_size: int
    """Sequences of the micro-batch; tokens come as [sequence, batch]."""

    counted: bool
    """Whether it is the one pass of its micro-batch that counts, which is one that backward follows."""

    attached: bool
    """Losses' gradients are attached: in every pass of training that autograd records."""


class Passes:
    """What a router has to remember of its passes."""

    def __init__(self) -> None:
        self._now: Pass | None = None
        self._to_come_again = 0

    @contextmanager
    def begun(self, router: Any, batch_size: int) -> Iterator[None]:
        """A forward pass of ``router`` runs within."""
        self._now = Pass(
            batch_size=batch_size, counted=self._counts(router.training), attached=_is_recorded(router)
        )
        try:
            yield
        finally:
            self._now = None

    def now(self, router: Any) -> Pass:
        """The pass that runs; of a part that is called by itself, one that counts if it is training."""
        recorded = _is_recorded(router)
        return self._now or Pass(batch_size=1, counted=recorded, attached=recorded)

    def forget(self) -> None:
        """A new step begins."""
        self._to_come_again = 0

    def _counts(self, training: bool) -> bool:
        """Megatron's checkpointing runs forward without gradients and again, with them, within backward;
        torch's other kind (``use_reentrant=False``) runs both with gradients. Either counts once."""
        if not training:
            return False
        gradients = torch.is_grad_enabled()
        if torch._C._current_graph_task_id() == -1:
            self._to_come_again += not gradients
            return gradients
        if gradients and self._to_come_again:
            self._to_come_again -= 1
            return True
        return False


def _is_recorded(router: Any) -> bool:
    return bool(router.training and torch.is_grad_enabled())
