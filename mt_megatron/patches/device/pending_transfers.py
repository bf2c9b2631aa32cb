"""A pending transfer lives until it is done, also when the schedule lets go of its handle.

NCCL orders a transfer on a stream and needs no handle afterwards. Gloo forgets a transfer whose handle is
collected: the peer then waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_abandoned: list[Any] = []
"""Transfers whose handles were dropped without a wait, such as the last sends of a forward-only
interleaved schedule."""

_LAST_WAIT = timedelta(seconds=5)
"""For transfers whose groups end: after an error, no peer may be there to take part in them."""


class _Pending:
    """The handle of a transfer, which outlives being dropped."""

    def __init__(self, work: Any) -> None:
        self._work: Any = work

    def wait(self, *args: Any) -> Any:
        # Gloo's own handle can be waited for only once: a second wait never returns.
        work, self._work = self._work, None
        return True if work is None else work.wait(*args)

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def __del__(self) -> None:
        if self._work is not None:
            _abandoned.append(self._work)


def end_transfers() -> None:
    """Wait for the transfers whose handles were dropped and let go of them: each keeps the threads and
    sockets of its group, which is about to end. After an error, or what does not end soon, the rest is let
    go of as it is."""
    try:
        while _abandoned:
            _abandoned.pop().wait(_LAST_WAIT)
    except RuntimeError:
        _abandoned.clear()


def _p2p_ops(original: Callable[..., list[Any]], **kwargs: Any) -> list[_Pending]:
    # By now the schedule that dropped them has ended everywhere or will without our help.
    while _abandoned:
        _abandoned.pop().wait()
    return [_Pending(work) for work in original(**kwargs)]


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="p2p.pending_transfers",
            target="megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
            kind="wrap",
            feature="collectives",
            backends=frozenset({"cpu"}),
            reason="Gloo loses a transfer whose handle is dropped",
            body=_p2p_ops,
            digest="0ac270f03d1f127aa96e6f80815a17644993c11c656cf91cd4641a04358f1598",
        )
    ]
