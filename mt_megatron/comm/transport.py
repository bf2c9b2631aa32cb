"""Channels between ranks: the interface below the executor and below Megatron-Core's own schedules.

A message belongs to an ``Edge``, a queue from one rank to another: messages of one edge arrive in the order
in which they were posted, on both sides; edges do not wait for each other. Posting never waits for the peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

FORWARD, BACKWARD = 0, 1
"""Lanes of the executor, and directions of a ``Label``: outputs of stages, gradients of their inputs."""

NOT_SAID = -1
"""A part of a ``Label`` that the sender does not know, or that the receiver does not ask for."""


class Edge(NamedTuple):
    """One queue. ``source`` and ``target`` are global ranks, ``lane`` (0 to 4,095) tells the queues between
    them apart."""

    source: int
    target: int
    lane: int


class Label(NamedTuple):
    """Place of a message in a step. A transport with message headers carries it, and compares it with the
    receiver's."""

    micro_batch: int = NOT_SAID
    chunk: int = NOT_SAID
    direction: int = NOT_SAID

    def agrees(self, other: Label) -> bool:
        """Whether no part that both sides say differs."""
        if self is other or other is UNLABELLED or self == other:
            return True
        return all(NOT_SAID in pair or pair[0] == pair[1] for pair in zip(self, other, strict=True))


UNLABELLED = Label()


class Lease(Protocol):
    """A message where it lies, such as in shared memory: a context whose value is the tensor.

    The tensor, and every view of it, must not be used after the context: the peer writes there again.
    """

    def __enter__(self) -> Tensor:
        """The message; on a device, complete for what the current stream does next."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the memory back to the sender."""


class Sending(Protocol):
    """A message on its way; it keeps what is sent, whatever becomes of the tensor's ``.data``."""

    def test(self) -> bool:
        """True if the memory is free again; False if not, or if it is not known without ``wait``. Does not
        wait; raises as ``wait`` does when the transfer failed."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the memory is free again (on a device: for what the current stream does next).

        ``timeout``: seconds; None: the transport's. Raises TransferTimeout and PeerLost.
        """


class Receiving(Protocol):
    """A message that is expected. It is taken once, by ``wait`` or by ``lease``."""

    def test(self) -> bool:
        """True if ``wait`` would not wait for the peer; False if it would, or if that is not known."""

    def wait(self, timeout: float | None = None) -> Tensor:
        """The message in memory of its own; on a device, complete for what the current stream does next.

        ``timeout``: seconds; None: the transport's. Raises TransferTimeout, PeerLost and MessageMismatch.
        """

    def lease(self, timeout: float | None = None) -> Lease:
        """The message where it lies, if the transport can give that; else as ``wait``. Waits and raises as
        ``wait`` does."""

    @property
    def label(self) -> Label:
        """What the sender said, once the message was taken; ``UNLABELLED`` before, and where the transport
        sends no headers."""


@runtime_checkable
class Transport(Protocol):
    """Channels of one rank to its neighbours. Calls come from one thread, where a transport does not say
    that they may come from several."""

    name: str
    """As in ``--p2p-transport``: ``collective``, ``shm``, ``rdma``, ``nixl``."""

    def prepare(self, edges: Iterable[Edge]) -> None:
        """Make what ``edges``, all those that this rank is going to use, need. All ranks of the pipeline
        call it with the edges of the same schedule, also those without new ones; edges that exist already
        are left as they are.

        Raises TransportUnavailable, TransferTimeout and PeerLost.
        """

    def post_send(
        self, edge: Edge, tensor: Tensor, *, with_shape: bool = False, label: Label = UNLABELLED
    ) -> Sending:
        """Start sending ``tensor``. ``with_shape``: the receiver does not know the shape."""

    def post_recv(
        self,
        edge: Edge,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
        *,
        label: Label = UNLABELLED,
        out: Tensor | None = None,
    ) -> Receiving:
        """Make ready for a tensor of ``shape``; None where the sender says it (``with_shape``). ``out``: a
        contiguous tensor of that shape and dtype that ``wait`` fills and returns; None: a new one."""

    def finish(self) -> None:
        """Return when everything that was posted is over: the end of a step."""

    def abandon(self, cause: BaseException | None = None) -> None:
        """Let go of everything that was posted, after an error, ``cause``. Ranks may have stopped at
        different messages, so every later use is refused with the error's text. Again: nothing."""

    def require_open(self) -> None:
        """Raise TransportError if it was abandoned or closed. Waits for nobody."""

    def close(self) -> None:
        """Give back memory, connections and threads, after ``finish`` or ``abandon``. Again: nothing."""


class Owned:
    """``Lease`` of a message that has memory of its own: there is nothing to give back."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __enter__(self) -> Tensor:
        return self._tensor

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None
