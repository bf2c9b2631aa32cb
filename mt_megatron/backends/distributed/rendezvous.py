"""Rendezvous of ranks: one that no earlier attempt of the job can disturb, and a store on 127.0.0.1 alone.

When torchrun starts its workers again (``--max-restarts``), recent torch gives them the store of the
attempt before, in which the addresses of the dead still stand: Gloo then connects to nobody and the
restart fails. Nor is there a number of the attempt that all nodes agree on: each agent counts the
failures of its own workers. So the ranks first agree on a name that is new, and meet below it.

The same holds for a second default group of one attempt: torch names its keys as the first one's, and a rank
that reads before its peer writes connects to the address of a group that has ended.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mt_megatron.backends.torch_version import torch_is_before
from mt_megatron.errors import BackendError

_PREFIX = "mt_megatron/attempt"
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """This start of the ranks, as rank 0 counts it in the launcher's store, which outlives it."""

    store: Any
    number: int
    """From 1."""


_attempt: Attempt | None = None


def attempt() -> Attempt | None:
    """The attempt that ``elastic_group`` joined as rank 0; None on other ranks, and where torchrun starts no
    worker again."""
    return _attempt


def elastic_group(timeout: timedelta) -> dict[str, Any]:
    """Arguments of ``init_process_group`` for a worker that uses torchrun's store; empty for others.

    Raises ``BackendError`` when the other ranks do not come within ``timeout``.
    """
    global _attempt
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    name = fresh_name(store, rank, world_size, timeout)
    if rank == 0 and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        _attempt = Attempt(store=store, number=store.add(f"{_PREFIX}/number", 1))
    return {"store": PrefixStore(f"{_PREFIX}/{name}", store), "rank": rank, "world_size": world_size}


def fresh_name(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that all ``world_size`` ranks have now, and had in no earlier attempt; collective.

    Each rank asks under a random word of its own. Rank 0 answers every word it sees, also one that
    the dead left, until every rank has confirmed the answer.
    """
    word = secrets.token_hex(8)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank != 0:
        store.set(f"{_PREFIX}/word/{rank}", word)
        name = str(store.get(f"{_PREFIX}/answer/{word}").decode())
        store.set(f"{_PREFIX}/confirmed/{name}/{rank}", "1")
        return name
    answered: dict[int, str] = {}
    missing = set(range(1, world_size))
    while missing:
        if time.monotonic() > deadline:
            raise BackendError(
                f"ranks {sorted(missing)} did not come within {timeout}; see what their processes say"
            )
        for other in sorted(missing):
            if store.check([f"{_PREFIX}/confirmed/{word}/{other}"]):
                missing.discard(other)
            elif store.check([f"{_PREFIX}/word/{other}"]):
                asked = store.get(f"{_PREFIX}/word/{other}").decode()
                if answered.get(other) != asked:
                    answered[other] = asked
                    store.set(f"{_PREFIX}/answer/{asked}", word)
        if missing:
            time.sleep(_POLL_SECONDS)
    return word


def loopback_store() -> tuple[Any, int]:
    """A ``TCPStore`` for processes of this machine, and its port.

    A store that torch binds itself listens on every address, even for 127.0.0.1. Keep the store for
    as long as anybody may meet there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    # detach(): the store owns the descriptor from here and closes it when it is deleted.
    given: dict[str, Any] = {
        "is_master": True,
        "wait_for_workers": False,
        "master_listen_fd": listener.detach(),
    }
    if torch_is_before(2, 8):
        # There only the older of torch's two servers takes a socket that is bound already.
        given["use_libuv"] = False
    return TCPStore("127.0.0.1", port, **given), port
