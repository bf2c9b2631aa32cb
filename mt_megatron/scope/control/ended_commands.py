"""Commands that all ranks follow together, and one of them cannot: are the others out of it, too?

A rank that fails between two collectives of a command leaves the others in one, where they wait for it. It
must not go on to the next collective of the run, which theirs would take for its part of their own. Ranks
tell over the store of their process group, which needs no collective, that they are out of a command.
"""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import torch.distributed as dist

from mt_megatron.errors import MtMegatronError

SECONDS = 30.0
"""Limit of a failed rank's wait for the others: they are in the command's last part, or never come."""

_numbers = count()
"""Of commands of this process; all ranks follow the same ones."""


class EndedCommand:
    """One command, on one rank."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._key = f"mt_megatron/scope/command/{next(_numbers)}"
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._store: Any = dist.distributed_c10d._get_default_store() if several else None

    def tell(self) -> None:
        """This rank is out of the command, with an error or without."""
        if self._store is not None:
            self._store.set(f"{self._key}/{dist.get_rank()}", b"out")

    def forget(self) -> None:
        """All ranks know how it ended, by a collective since: nobody looks for this rank's word any more."""
        if self._store is not None:
            self._store.delete_key(f"{self._key}/{dist.get_rank()}")

    def require_all(self, error: BaseException) -> None:
        """Return when all ranks are out of the command that failed here with ``error``. Raises
        MtMegatronError, which ends the run, where some are not within ``SECONDS``."""
        if self._store is None:
            return
        inside, deadline = list(range(dist.get_world_size())), time.monotonic() + SECONDS
        # Not by a wait of the store's, which holds the connection that other threads use.
        while inside := [rank for rank in inside if not self._store.check([f"{self._key}/{rank}"])]:
            if time.monotonic() > deadline:
                raise MtMegatronError(
                    f"{self._name} failed on rank {dist.get_rank()} alone ({type(error).__name__}: {error}) "
                    f"while {_named(inside)} in the middle of it, from where nothing can call them back: the "
                    "run ends. Ask for less at a time, or resume from the last checkpoint without it"
                ) from error
            time.sleep(0.05)


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown} is" if len(ranks) == 1 else f"ranks {shown} are"
