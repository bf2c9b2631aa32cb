"""Channels between pipeline ranks: the interface below the executor.

A message belongs to an ``Edge``, a queue from one rank to another: messages of one edge arrive in the order
in which they were posted, on both sides; edges do not wait for each other. Posting never waits for the peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FORWARD, BACKWARD = 0, 1
"""Lanes of the executor: outputs of stages, gradients of their inputs."""


class Edge(NamedTuple):
    """One queue. ``source`` and ``target`` are global ranks, ``lane`` (0 to 4,095) tells the queues between
    them apart."""

    source: int
    target: int
    lane: int


class Sending(Protocol):
    """A message on its way; it keeps what is sent, whatever becomes of the tensor's ``.data``."""

    def is_done(self) -> bool:
        """True if the memory is free again; False if not, or if it is not known without ``wait``."""

    def wait(self) -> None:
        """Return when the memory is free again (on a device: for what the current stream does next)."""


class Receiving(Protocol):
    """A message that is expected."""

    def wait(self) -> Tensor:
        """The message, once; on a device, complete for what the current stream does next."""


class Transport(Protocol):
    """Channels of one rank to its neighbours. Calls come from one thread."""

    def prepare(self, edges: Iterable[Edge]) -> None:
        """Make what ``edges``, all those that this rank is going to use, need. All ranks of the pipeline
        call it with the edges of the same schedule; edges that exist already are left as they are."""

    def post_send(self, edge: Edge, tensor: Tensor, *, with_shape: bool = False) -> Sending:
        """Start sending ``tensor``. ``with_shape``: the receiver does not know the shape."""

    def post_recv(self, edge: Edge, shape: Sequence[int] | None, dtype: torch.dtype) -> Receiving:
        """Make ready for a tensor of ``shape``; None where the sender says it (``with_shape``)."""

    def finish(self) -> None:
        """Return when everything that was posted is over: the end of a step."""

    def abandon(self) -> None:
        """Let go of everything that was posted, after an error; the edges must not be used again."""
