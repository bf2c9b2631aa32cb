"""Transport over ``torch.distributed``'s point-to-point operations.

Gloo tells messages apart by tags, all of them in a pipeline's own group. NCCL (and MCCL) has no tags and
runs the transfers of a communicator one after another, so each edge has a group of its two ranks.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mt_megatron.comm.errors import TransferTimeout, TransportError, given_up
from mt_megatron.comm.transport import BACKWARD, FORWARD, UNLABELLED, Edge, Label, Owned
from mt_megatron.errors import MtMegatronError
from mt_megatron.seams import collectives

_TAGS = 1 << 28
"""Tags from here on are ours: upstream's transfers have tag 0."""

_NUMBERS = 1 << 16
"""Messages of an edge between two that share a tag."""

_MOST_DIMS = 8


class CollectiveTransport:
    """See ``transport.Transport``. Labels are not sent: there are no headers."""

    name = "collective"

    def __init__(self, group: Any, device: torch.device, *, tagged: bool | None = None) -> None:
        """``group``: the pipeline's; the list of them on a rank that is part of several. ``tagged``: whether
        its library tells messages apart by tags (None: Gloo does)."""
        groups = group if isinstance(group, list) else [group]
        self._pipelines = groups
        self._group = group = groups[0]
        self._device = device
        # Of two pipelines that share a pair of ranks the first, which it is on both of them.
        self._group_to = {
            peer: each for each in reversed(groups) for peer in dist.get_process_group_ranks(each)
        }
        self._tagged = library_of(group, device) == "gloo" if tagged is None else tagged
        self._groups: dict[Edge, Any] = {}
        self._sent: dict[Edge, int] = {}
        self._received: dict[Edge, int] = {}
        self._sendings: deque[_Sending] = deque()
        self._receivings: list[_Receiving] = []
        self._unknown: dict[Edge, deque[_Receiving]] = {}
        self._ended: str | None = None

    def prepare(self, edges: Iterable[Edge]) -> None:
        """Without tags collective over all ranks of the pipeline: new edges are connected."""
        self.require_open()
        if self._tagged:
            return
        own = dist.get_rank()
        # The answers too: an evaluation has none, and the training after it makes no groups.
        both = {each for edge in edges for each in (edge, _answer(edge))}
        new = sorted(each for each in both if own in each[:2] and each not in self._groups)
        # A rank without new edges takes part: others of its pipeline may have some, and it cannot know.
        given = uuid.uuid4().hex, new
        found: dict[int, tuple[str, list[Edge]]] = {}
        for pipeline in self._pipelines:
            ranks = dist.get_process_group_ranks(pipeline)
            every = [given] * len(ranks)
            with collectives.announced("all_gather_object", "pp", pipeline):
                dist.all_gather_object(every, given, group=pipeline)
            found |= zip(ranks, every, strict=True)
        wanted = {Edge(*each) for _, edges in found.values() for each in edges}
        # Groups are made and edges connected in an order that all ranks share: none waits for a peer that
        # waits for it.
        mine = sorted(edge for edge in wanted if own in edge[:2])
        for edge in mine:
            token, _ = found[edge.source]
            self._groups[edge] = _group_of_two(
                edge, f"mt_megatron/{token}/{edge.target}-{edge.lane}", self._group, self._device
            )
        for edge in mine:
            self._connect(edge)

    def post_send(
        self, edge: Edge, tensor: Tensor, *, with_shape: bool = False, label: Label = UNLABELLED
    ) -> _Sending:
        while self._sendings and self._sendings[0].test():
            self._sendings.popleft()
        # A tensor of its own: ``deallocate_output_tensor`` exchanges the storage of the one given.
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        parts = [_shape_message(tensor, self._device), tensor] if with_shape else [tensor]
        sending = _Sending([(self._start(dist.isend, edge, part), part) for part in parts])
        self._sendings.append(sending)
        return sending

    def post_recv(
        self,
        edge: Edge,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
        *,
        label: Label = UNLABELLED,
        out: Tensor | None = None,
    ) -> _Receiving:
        receiving = _Receiving(self, edge, shape, dtype, out)
        self._receivings.append(receiving)
        if shape is not None:
            receiving.start()
            return receiving
        # The next shape comes after this message, on the wire as on the sender's side.
        waiting = self._unknown.setdefault(edge, deque())
        waiting.append(receiving)
        if len(waiting) == 1:
            receiving.start()
        return receiving

    def finish(self) -> None:
        missing = [receiving for receiving in self._receivings if not receiving.is_over]
        if missing:
            raise MtMegatronError(
                f"{len(missing)} transfer(s) were made ready for and not taken, the first from rank "
                f"{missing[0].edge.source}; the schedule was not checked before it ran"
            )
        self._receivings.clear()
        while self._sendings:
            self._sendings.popleft().wait()

    def require_open(self) -> None:
        if self._ended is not None:
            raise TransportError(f"this transport {self._ended}")

    def abandon(self, cause: BaseException | None = None) -> None:
        # Messages of the step that failed may be on their way: a receive of a later step would take them.
        self._ended = self._ended or given_up(cause)
        # Gloo writes into these buffers as long as the connection lives.
        _abandoned.extend(self._sendings)
        _abandoned.extend(self._receivings)
        self._sendings.clear()
        self._receivings.clear()
        self._unknown.clear()

    def close(self) -> None:
        """Nothing: the process groups are torch's, and end with the others."""

    def before(self, receiving: _Receiving) -> list[_Receiving]:
        """Receives before ``receiving`` in a queue of unknown shapes whose messages have not come."""
        waiting = list(self._unknown.get(receiving.edge, ()))
        return waiting[: waiting.index(receiving)] if receiving in waiting else []

    def arrived(self, receiving: _Receiving) -> None:
        """``receiving`` has its message."""
        waiting = self._unknown.get(receiving.edge)
        if waiting and waiting[0] is receiving:
            waiting.popleft()
            if waiting:
                waiting[0].start()

    def taken(self, receiving: _Receiving) -> None:
        """The message of ``receiving`` was taken."""
        self._receivings.remove(receiving)

    def receive_into(self, edge: Edge, buffer: Tensor) -> Any:
        """Start the edge's next message into ``buffer``."""
        return self._start(dist.irecv, edge, buffer)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def _connect(self, edge: Edge) -> None:
        """Send one element over ``edge``. NCCL connects a group in its first transfer, which holds up the
        host until the peer makes its own: a receive ahead of its message would wait for a send that the peer
        makes after a message of ours, for ever."""
        operation = dist.isend if dist.get_rank() == edge.source else dist.irecv
        work = self._start(operation, edge, torch.zeros(1, device=self._device))
        _wait(work, None)

    def _start(self, operation: Any, edge: Edge, tensor: Tensor) -> Any:
        sends = operation is dist.isend
        peer = edge.target if sends else edge.source
        if not self._tagged:
            return operation(tensor, peer, group=self._groups[edge])
        counts = self._sent if sends else self._received
        number = counts.get(edge, 0)
        counts[edge] = number + 1
        tag = _TAGS + edge.lane * _NUMBERS + number % _NUMBERS
        return operation(tensor, peer, group=self._group_to.get(peer, self._group), tag=tag)


_abandoned: list[Any] = []


class _Sending:
    """Works and the tensors that they read. One thread may wait while another tests."""

    def __init__(self, parts: list[tuple[Any, Tensor]]) -> None:
        self._parts = parts

    def test(self) -> bool:
        # Gloo's works say so only after a wait.
        if all(work.is_completed() for work, _ in tuple(self._parts)):
            self._parts = []
        return not self._parts

    def wait(self, timeout: float | None = None) -> None:
        # A work of Gloo's can be waited for once; what was not over is waited for again.
        parts = self._parts
        while parts:
            _wait(parts[0][0], timeout)
            del parts[0]


class _Receiving:
    label = UNLABELLED

    def __init__(
        self,
        transport: CollectiveTransport,
        edge: Edge,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> None:
        self.edge = edge
        self.is_over = False
        self._has_arrived = False
        self._out = out
        self._transport = transport
        self._shape = shape
        self._dtype = dtype
        self._work: Any = None
        self._buffer: Tensor | None = None

    def start(self) -> None:
        if self._shape is None:
            self._buffer = self._transport.empty((1 + _MOST_DIMS,), torch.int64)
        elif self._out is not None:
            self._buffer = self._out
        else:
            self._buffer = self._transport.empty(self._shape, self._dtype)
        self._work = self._transport.receive_into(self.edge, self._buffer)

    def test(self) -> bool:
        # Gloo's works say so only after a wait; the elements of a message of unknown shape come after it.
        if self._has_arrived:
            return True
        return self._work is not None and self._shape is not None and bool(self._work.is_completed())

    def lease(self, timeout: float | None = None) -> Owned:
        return Owned(self.wait(timeout))

    def wait(self, timeout: float | None = None) -> Tensor:
        for each in self._transport.before(self):
            each.arrive(timeout)
        self.arrive(timeout)
        message, self._buffer, self._work = self._buffer, None, None
        if message is None:
            raise MtMegatronError(
                f"a message from rank {self.edge.source} is taken twice; keep what the first wait returned"
            )
        self.is_over = True
        self._transport.taken(self)
        return message

    def arrive(self, timeout: float | None) -> None:
        """Return when the message is here."""
        if self._has_arrived:
            return
        _wait(self._work, timeout)
        if self._shape is None:
            assert self._buffer is not None
            dims, *sizes = self._buffer.tolist()
            self._shape = sizes[:dims]
            self.start()
            _wait(self._work, timeout)
        self._has_arrived = True
        self._transport.arrived(self)


_changing = threading.Lock()


def _group_of_two(edge: Edge, name: str, pipeline: Any, device: torch.device) -> Any:
    """A group of the edge's ranks like ``pipeline``, made by these two alone. ``name``: the same on both, and
    of no group before.

    By itself torch names such a group by the number of groups that the process is in: the peer may be in
    another number and wait for another group, and a number comes again after groups were destroyed. And it
    splits the communicator of a default group that is bound to a device, for which it needs all of its ranks.
    """
    with _changing:
        by_torch = distributed_c10d._process_group_name, distributed_c10d._get_split_source
        distributed_c10d._process_group_name = lambda ranks, use_hashed_name: name  # type: ignore[assignment, return-value]
        distributed_c10d._get_split_source = lambda pg: None
        try:
            return dist.new_group(
                [edge.source, edge.target],
                timeout=_timeout(pipeline, device),
                backend=dist.get_backend(pipeline),
                use_local_synchronization=True,
            )
        finally:
            distributed_c10d._process_group_name, distributed_c10d._get_split_source = by_torch


def _answer(edge: Edge) -> Edge:
    """The edge of the gradients of what goes over ``edge``, and the other way about."""
    return Edge(edge.target, edge.source, BACKWARD if edge.lane == FORWARD else FORWARD)


def _wait(work: Any, timeout: float | None) -> None:
    """``timeout``: seconds; None: the group's."""
    try:
        work.wait() if timeout is None else work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        if "imed out" in str(error):
            raise TransferTimeout(
                f"{error}; see what the peer's process says, or raise --distributed-timeout-minutes"
            ) from error
        raise


def _shape_message(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.dim() > _MOST_DIMS:
        raise MtMegatronError(
            f"found a tensor of {tensor.dim()} dimensions to send; expected at most {_MOST_DIMS}"
        )
    sizes = [tensor.dim(), *tensor.shape, *[0] * (_MOST_DIMS - tensor.dim())]
    return torch.tensor(sizes, dtype=torch.int64, device=device)


def library_of(group: Any, device: torch.device) -> str:
    """The library that carries tensors of ``device`` in ``group``. A group that was made with
    ``cpu:gloo,cuda:nccl``, or one of the two, says just that."""
    named = str(dist.get_backend(group))
    by_device = dict(each.split(":", 1) for each in named.split(",") if ":" in each)
    return by_device.get(device.type, named)


def _timeout(group: Any, device: torch.device) -> Any:
    """That of ``group``, so that a rank that is gone is noticed no later than elsewhere."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
