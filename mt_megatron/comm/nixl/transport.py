"""Transport over NIXL: rings, credits and messages are those of ``comm.rdma``, the writes are NIXL's."""

from __future__ import annotations

import importlib.util

from mt_megatron.comm.nixl.agent import open_agent
from mt_megatron.comm.rdma import verbs
from mt_megatron.comm.rdma.transport import RdmaTransport

MODULES = ("nixl", "nixl_cu12", "nixl_cu13")


class NixlTransport(RdmaTransport):
    """See ``RdmaTransport``. NIXL has no descriptor to wait on, so a thread asks it for news, at first often,
    then every millisecond."""

    name = "nixl"

    @staticmethod
    def _open_device() -> verbs.Device:
        return open_agent()


def unavailable_here() -> str | None:
    """Why no rank of this machine can use NIXL; None where it may. Loads nothing."""
    if any(importlib.util.find_spec(name) is not None for name in MODULES):
        return None
    return (
        "nixl is not installed; install it with pip install --no-deps nixl nixl-cu12 (its dependencies would "
        "replace torch)"
    )
