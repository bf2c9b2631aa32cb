"""The transports by name: whether they work on this machine, between two ranks, and how one is made.

Nothing here imports a transport before it is used: some need libraries that are not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mt_megatron.backends.current import current_backend
from mt_megatron.comm.bootstrap import Place, default_bootstrap
from mt_megatron.comm.collective import CollectiveTransport
from mt_megatron.comm.transport import Transport
from mt_megatron.seams.transport import COLLECTIVE

VERBS = Path("/sys/class/infiniband")
DEVICES = Path("/dev/infiniband")


@dataclass(frozen=True)
class Setting:
    """What a transport of this rank is made from."""

    group: Any
    """The pipeline's process group; of several the first."""

    device: torch.device
    name: str
    """The same on all ranks, another for each set of process groups."""

    seconds: float
    """Longest wait for a peer: that of the process group."""


@dataclass(frozen=True)
class Kind:
    """One transport."""

    why_not_here: Callable[[], str | None]
    """Why this machine cannot use it; None: it can."""

    why_not_between: Callable[[Place, Place], str | None]
    """Why it does not reach from one process to another, each of which can use it; None: it may."""

    make: Callable[[Setting], Transport]
    """Not collective. Raises TransportUnavailable."""


def why_not(name: str) -> str | None:
    """Why this machine cannot use the transport ``name``; None: it can. Raises nothing: what goes wrong while
    looking is the reason."""
    try:
        return KINDS[name].why_not_here()
    except Exception as error:  # noqa: BLE001 - a library that cannot be loaded can raise anything
        return f"{type(error).__name__}: {error}"


def _nothing() -> str | None:
    return None


def _anywhere(one: Place, other: Place) -> str | None:
    return None


# collective


def _collective(setting: Setting) -> Transport:
    return CollectiveTransport(setting.group, setting.device)


# shm


def _no_shared_memory() -> str | None:
    if not hasattr(os, "memfd_create"):
        return "this Python has no os.memfd_create, which is a call of Linux"
    from mt_megatron.comm.shared_memory.transport import unavailable_here

    return unavailable_here()


def _out_of_reach(one: Place, other: Place) -> str | None:
    from mt_megatron.comm.shared_memory.peers import out_of_reach

    return out_of_reach(one, other)


def _shared_memory(setting: Setting) -> Transport:
    from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport

    made: Transport = SharedMemoryTransport(
        default_bootstrap(setting.name),
        device=setting.device,
        backend=current_backend(),
        timeout=setting.seconds,
    )
    return made


# rdma


def _no_verbs() -> str | None:
    if find_spec("mt_megatron.comm.rdma") is None:
        return "this version of mt_megatron has no RDMA transport"
    if not VERBS.is_dir() or not any(VERBS.iterdir()):
        return f"there is no verbs device ({VERBS} is empty or missing)"
    doors = sorted(DEVICES.glob("uverbs*"))
    if not doors:
        return f"there is no {DEVICES}/uverbs*: give the container the device"
    if not any(os.access(door, os.R_OK | os.W_OK) for door in doors):
        return f"there is no permission to read and write {doors[0]}"
    if find_spec("pyverbs") is None:
        return "pyverbs is not installed: pip install pyverbs, or the system's python3-pyverbs"
    return None


def _rdma(setting: Setting) -> Transport:
    from mt_megatron.comm.rdma.transport import RdmaTransport

    made: Transport = RdmaTransport(
        default_bootstrap(setting.name), setting.device, backend=current_backend(), timeout=setting.seconds
    )
    return made


# nixl


def _no_nixl() -> str | None:
    if find_spec("mt_megatron.comm.nixl") is None:
        return "this version of mt_megatron has no NIXL transport"
    if find_spec("nixl") is None:
        return "nixl is not installed: pip install --no-deps nixl"
    return None


def _nixl(setting: Setting) -> Transport:
    from mt_megatron.comm.nixl.transport import NixlTransport

    made: Transport = NixlTransport(
        default_bootstrap(setting.name), setting.device, backend=current_backend(), timeout=setting.seconds
    )
    return made


KINDS: Mapping[str, Kind] = {
    "shm": Kind(_no_shared_memory, _out_of_reach, _shared_memory),
    "rdma": Kind(_no_verbs, _anywhere, _rdma),
    "nixl": Kind(_no_nixl, _anywhere, _nixl),
    COLLECTIVE: Kind(_nothing, _anywhere, _collective),
}
"""By name, in the order in which channels are made."""
