"""Exchange of small bytes between ranks before there is a channel: addresses, keys, who a peer is.

The bytes go through a ``torch.distributed`` store, below a prefix of their own. They are JSON or structs of
fixed size: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from mt_megatron.comm.errors import TransferTimeout
from mt_megatron.host.machine import machine

PREFIX = "mt_megatron/p2p"

_POLL_SECONDS = 0.002
"""Between two looks for a key: a store's blocking ``get`` holds its connection, which other threads use."""

_LONGEST_POLL_SECONDS = 0.05


class Bootstrap(Protocol):
    """Bytes by key; a key is written once and by one rank. Calls may come from several threads."""

    rank: int
    """Global rank of this process."""

    def publish(self, key: str, value: bytes) -> None:
        """Make ``value`` readable for all ranks."""

    def fetch(self, key: str, timeout: float) -> bytes:
        """Bytes that were or will be published under ``key``. Raises TransferTimeout after ``timeout`` s."""


class StoreBootstrap:
    """``Bootstrap`` over a ``torch.distributed`` store."""

    def __init__(self, store: Any, rank: int, name: str) -> None:
        """``name``: of what meets here, such as ``shm/0``: the same on all ranks, another for each transport
        object, so that keys are never written twice."""
        import torch.distributed as dist

        self.rank = rank
        self._name = name
        self._store = dist.PrefixStore(f"{PREFIX}/{name}", store)  # type: ignore[attr-defined]

    def publish(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # Bytes are what it stores.

    def fetch(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        pause = _POLL_SECONDS
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TransferTimeout(
                    f"rank {self.rank} waited {timeout:.3g} s for the key {key!r} of {self._name!r}, which "
                    "another rank has to publish; see what that rank's process says, or raise the time-out"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        return bytes(self._store.get(key))


def default_bootstrap(name: str) -> StoreBootstrap:
    """Over the store of the default process group, which must exist. Collective in nothing."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    return StoreBootstrap(store, dist.get_rank(), name)


@dataclass(frozen=True)
class Place:
    """Home of a rank's process: what decides which transports reach it, and how an error names it."""

    rank: int
    host: str
    pid: int
    boot: str
    """Of the kernel: the same for all containers of one machine, another after a reboot."""

    network: str
    """Network namespace: abstract Unix sockets are seen within one."""

    user: int

    processes: str = ""
    """PID namespace: ``pid`` names the process within it. Empty where that is not known."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(encoded: bytes) -> Place:
        return Place(**json.loads(encoded))


def own_place(rank: int) -> Place:
    """That of this process."""
    return Place(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        boot=machine(),
        network=_link("/proc/self/ns/net"),
        user=os.getuid(),
        processes=_link("/proc/self/ns/pid"),
    )


def has_ended(place: Place) -> bool:
    """True where the process of ``place`` is known to be gone. A process of another kernel or PID namespace
    cannot be asked for."""
    own = own_place(place.rank)
    is_near = (place.boot, place.processes) == (own.boot, own.processes)
    if not (place.boot and place.processes and is_near):
        return False
    try:
        process = os.pidfd_open(place.pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):
        return False
    try:
        poll = select.poll()
        # Readable from the process's end on, even while its parent has not waited for it.
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(process)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
