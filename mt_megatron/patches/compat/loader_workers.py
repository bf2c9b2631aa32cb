"""Workers of torch's DataLoader are not ended by the signals that ask a run to save and end."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.backends.loader_workers import shield, starting
from mt_megatron.patching.spec import Patch


def _then_shielded(original: Callable[[], None]) -> Callable[[], None]:
    """The first call in every worker, whether it was forked or spawned."""

    @functools.wraps(original)
    def set_worker_signal_handlers() -> None:
        original()
        shield()

    return set_worker_signal_handlers


def _started_shielded(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start_workers(self: Any, loader: Any) -> None:
        with starting(loader.multiprocessing_context):
            original(self, loader)

    return start_workers


def patches(backend: Backend) -> list[Patch]:
    """For every backend, on Linux: other systems do not tell who sent a signal."""
    if not sys.platform.startswith("linux"):
        return []
    return [
        Patch(
            id="loader_workers.shield",
            target="torch.utils.data._utils.signal_handling:_set_worker_signal_handlers",
            kind="value",
            feature="loader_workers",
            reason="a request to save and end that reaches the process group ended the workers, and their "
            "loss the training, before the checkpoint",
            body=_then_shielded,
        ),
        Patch(
            id="loader_workers.start",
            target="torch.utils.data.dataloader:_MultiProcessingDataLoaderIter.__init__",
            kind="value",
            feature="loader_workers",
            reason="a worker has to be shielded from its first instruction on",
            body=_started_shielded,
        ),
    ]
