"""Where the transfers of Megatron-Core's own schedules go: its own way, or over a transport of ours.

    transport.choose(open_exchange)   # called on every rank once process groups exist
    transport.close()                 # before they end

One ``Exchange`` holds for a process, as Megatron-Core's process groups do: every model in it uses the same
pipeline. Nothing is installed by default, and then upstream's functions run unchanged.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mt_megatron.errors import ConfigError
from mt_megatron.near_names import hint

AUTO, COLLECTIVE = "auto", "collective"
NAMES = (AUTO, "shm", "rdma", "nixl", COLLECTIVE)
"""Values of ``--p2p-transport``; ``collective`` is Megatron-Core's own way."""


class Exchange(Protocol):
    """Transfers between the stages of this rank's pipeline."""

    transport: Any
    """Channels (``comm.transport.Transport``) for schedules that post their transfers themselves."""

    def communicate(
        self,
        *,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        config: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Any, Any, list[Any] | None]:
        """Arguments and result of ``_communicate`` of ``p2p_communication``."""

    def communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool, config: Any
    ) -> tuple[list[int], list[int]]:
        """Arguments and result of ``_communicate_shapes`` of ``p2p_communication``."""

    def finish(self) -> None:
        """Return when all transfers of a step are over."""

    def abandon(self, cause: BaseException | None = None) -> None:
        """Let go of the transfers of a step that failed with ``cause``; later steps are refused with its
        text."""

    def close(self) -> None:
        """Give back memory, connections and threads."""


Open = Callable[[], "Exchange | None"]
"""Collective over all ranks, after process groups were made; None leaves everything to upstream."""

_open: Open | None = None
_exchange: Exchange | None = None
_carried: Mapping[str, int] = {}
_inherited: list[Exchange] = []
"""Those of the process that this one was forked from: kept, because to end one would disturb its owner."""


def choose(opener: Open | None) -> None:
    """Let ``opener`` say what carries the transfers, each time that process groups are made; None: upstream.
    An exchange that is open stays until ``close``."""
    global _open
    _open = opener


def check(text: str) -> str:
    """``text`` if it is a value of ``--p2p-transport``. Raises ConfigError."""
    if text not in NAMES:
        raise ConfigError(
            f"found p2p_transport {text!r}; expected one of {', '.join(NAMES)}.{hint(text, NAMES)} Change "
            "--p2p-transport, or MT_MEGATRON_P2P_TRANSPORT where that was set"
        )
    return text


def groups_made() -> None:
    """Close what earlier process groups had and open what these get. Raises what the opener raises."""
    close()
    decided({})
    if _open is not None:
        install(_open())


def install(exchange: Exchange | None) -> None:
    """Send by ``exchange`` from now on, in place of an earlier one, which is closed."""
    global _exchange
    close()
    _exchange = exchange


def installed() -> Exchange | None:
    """What carries transfers; None: upstream does."""
    return _exchange


def decided(pairs: Mapping[str, int]) -> None:
    """Keep for ``carried`` what all ranks have agreed on."""
    global _carried
    _carried = dict(pairs)


def carried() -> Mapping[str, int]:
    """Transport -> pairs of neighbouring ranks that it carries, over all pipelines; empty where nothing was
    chosen, which leaves all to upstream."""
    return _carried


def close() -> None:
    """End what is installed, if anything is."""
    global _exchange
    exchange, _exchange = _exchange, None
    if exchange is not None:
        exchange.close()


def _forked() -> None:
    global _exchange
    if _exchange is not None:
        _inherited.append(_exchange)
        _exchange = None


os.register_at_fork(after_in_child=_forked)
atexit.register(close)
