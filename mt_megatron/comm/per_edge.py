"""One transport out of several: each edge has its own, such as shared memory within a host only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mt_megatron.comm.errors import TransportError
from mt_megatron.comm.transport import UNLABELLED, Edge, Label, Receiving, Sending, Transport
from mt_megatron.errors import MtMegatronError

Make = Callable[[], Transport]


class PerEdgeTransport:
    """``Transport`` that sends each edge over the one that ``kind_of`` names."""

    def __init__(self, makes: Mapping[str, Make], kind_of: Callable[[Edge], str]) -> None:
        """``makes``: name -> transport, made when the first of its edges is; channels are prepared in this
        order on all ranks. ``kind_of``: the same on both sides of an edge."""
        self._makes = makes
        self._kind_of = kind_of
        self._made: dict[str, Transport] = {}
        self._of: dict[Edge, Transport] = {}
        self._is_closed = False
        self.name = ""
        """Names of the transports in use, joined by ``+``."""

        self.preparing: str | None = None
        """The transport that is being made or prepared, or that failed to be; None otherwise."""

    def make(self, edges: Iterable[Edge]) -> None:
        """Make the transports of ``edges``, which does not wait for anybody. Raises TransportUnavailable."""
        needed = {self._kind_of(edge) for edge in edges}
        for name, make in self._makes.items():
            if name in needed and name not in self._made:
                self.preparing = name
                self._made[name] = make()
        self.name = "+".join(name for name in self._makes if name in self._made)
        self.preparing = None

    def prepare(self, edges: Iterable[Edge]) -> None:
        self.require_open()
        edges = tuple(edges)
        self.make(edges)
        new = [edge for edge in edges if edge not in self._of]
        kinds = {edge: self._kind_of(edge) for edge in new}
        # One kind after the other: a rank that waits for a peer's channel of one kind is never waited for by
        # a peer that makes another.
        for name in self._makes:
            of_kind = [edge for edge in new if kinds[edge] == name]
            if not of_kind:
                continue
            self.preparing = name
            self._made[name].prepare(of_kind)
            self._of.update(dict.fromkeys(of_kind, self._made[name]))
        self.preparing = None

    def post_send(
        self, edge: Edge, tensor: Tensor, *, with_shape: bool = False, label: Label = UNLABELLED
    ) -> Sending:
        return self._transport(edge).post_send(edge, tensor, with_shape=with_shape, label=label)

    def post_recv(
        self,
        edge: Edge,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
        *,
        label: Label = UNLABELLED,
        out: Tensor | None = None,
    ) -> Receiving:
        return self._transport(edge).post_recv(edge, shape, dtype, label=label, out=out)

    def _transport(self, edge: Edge) -> Transport:
        found = self._of.get(edge)
        if found is None:
            self.require_open()
            raise MtMegatronError(
                f"found a message for {edge}, which was not prepared; give all edges of a schedule to "
                "prepare()"
            )
        return found

    def finish(self) -> None:
        for each in self._made.values():
            each.finish()

    def abandon(self, cause: BaseException | None = None) -> None:
        for each in self._made.values():
            each.abandon(cause)

    def require_open(self) -> None:
        if self._is_closed:
            raise TransportError("this transport is closed; make a new one")
        for each in self._made.values():
            each.require_open()

    def close(self) -> None:
        self._is_closed = True
        while self._made:
            self._made.popitem()[1].close()
        self._of.clear()
