"""Where the ranks of a job leave each other short messages: torch's rendezvous store, over a connection of
our own, since the training's may be busy waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol


class Board(Protocol):
    """Messages by key. Methods may raise ``RuntimeError`` when the board is gone."""

    def write(self, key: str, text: str) -> None:
        """Leave ``text``, for everybody."""

    def read(self, key: str) -> str | None:
        """What was left, or None so far."""


class StoreBoard:
    """The store of ``torch.distributed``'s default group."""

    def __init__(self, name: str) -> None:
        """``name``: the same on all ranks, and no other board's of this job."""
        import torch.distributed as dist
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        store: Any = dist.distributed_c10d._get_default_store()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):
            patience = timedelta(seconds=30)
            store = TCPStore(
                store.host, store.port, is_master=False, wait_for_workers=False, timeout=patience
            )
        self._store = PrefixStore(f"mt_megatron/scan/{name}", store)

    def write(self, key: str, text: str) -> None:
        """Leave ``text``, for everybody."""
        self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """What was left, or None so far."""
        if not self._store.check([key]):
            return None
        text: str = self._store.get(key).decode()
        return text


def wait_for(board: Board, key: str, *, stopped: Callable[[float], bool], seconds: float) -> str | None:
    """What is left under ``key``, once it is there; None after ``seconds``, or when ``stopped(pause)``,
    which waits, says so."""
    until, pause = time.monotonic() + seconds, 0.02
    while (text := board.read(key)) is None:
        if time.monotonic() > until or stopped(pause):
            return None
        # A thousand ranks ask the same store.
        pause = min(2 * pause, 1.0)
    return text
