"""The transports by name: whether they work on this machine, between two ranks, and how one is made.

Nothing here imports a transport before it is used: some need libraries that are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from mt_megatron.backends.current import current_backend
from mt_megatron.comm.bootstrap import Place, default_bootstrap
from mt_megatron.comm.collective import CollectiveTransport
from mt_megatron.comm.transport import Transport
from mt_megatron.seams.transport import COLLECTIVE


@dataclass(frozen=True)
class Setting:
    """Inputs from which a transport of this rank is made."""

    groups: list[Any]
    """Process groups of the pipelines that this rank is part of."""

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
    """Why it does not reach from one process to another, each of which can use it, with their ranks; None: it
    may."""

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


def _collective(setting: Setting) -> Transport:
    return CollectiveTransport(setting.groups, setting.device)


def _out_of_reach(one: Place, other: Place) -> str | None:
    from mt_megatron.comm.shared_memory.peers import out_of_reach

    return out_of_reach(one, other)


def _in_package(name: str, transport: str, reaches: Callable[[Place, Place], str | None]) -> Kind:
    """The class ``transport`` of ``mt_megatron.comm.NAME.transport``, whose ``unavailable_here`` looks at
    this machine."""
    module = f"{__package__}.{name}.transport"

    def why_not_here() -> str | None:
        if find_spec(module.rpartition(".")[0]) is None:
            return f"this version of mt_megatron has no {module.rpartition('.')[0]}"
        why: str | None = import_module(module).unavailable_here()
        return why

    def make(setting: Setting) -> Transport:
        made: Transport = getattr(import_module(module), transport)(
            default_bootstrap(setting.name),
            device=setting.device,
            backend=current_backend(),
            timeout=setting.seconds,
        )
        return made

    return Kind(why_not_here, reaches, make)


KINDS: Mapping[str, Kind] = {
    "shm": _in_package("shared_memory", "SharedMemoryTransport", _out_of_reach),
    "rdma": _in_package("rdma", "RdmaTransport", _anywhere),
    "nixl": _in_package("nixl", "NixlTransport", _anywhere),
    COLLECTIVE: Kind(_nothing, _anywhere, _collective),
}
"""By name, in the order in which channels are made."""
