"""Transfers of Megatron-Core's own schedules over a transport: ``seams.transport.Exchange``.

What flows forward and what flows backward between two ranks are queues of their own. With two stages and
several chunks the same two ranks exchange both ways in one call, which upstream tells apart by the order of
its operations alone.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mt_megatron.comm.errors import TransportError
from mt_megatron.comm.transport import BACKWARD, FORWARD, Edge, Label, Receiving, Sending, Transport
from mt_megatron.errors import ConfigError
from mt_megatron.parallel import stage_order

_FORWARD, _BACKWARD = Label(direction=FORWARD), Label(direction=BACKWARD)

MOST_UNSENT = 8
"""Messages that may wait to be sent, with their memory, before the next waits for the oldest: as many as a
ring has slots."""

CLOSING_SECONDS = 10.0
"""Longest wait, when channels are closed, for peers to take what was sent."""

_SHAPE_DIMS = 3
"""Sizes of the tensors of ``_communicate_shapes``: sequence, micro-batch, hidden."""


class StageExchange:
    """``Exchange`` of this rank with the neighbours that ``megatron.core.parallel_state`` names."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        """``device``: where tensors are received. ``transport`` is closed with the exchange."""
        self.transport = transport
        self._device = device
        self._neighbours = _neighbours()
        self._rank = torch.distributed.get_rank()
        # Schedules drop handles; a step is over when each of them was waited for.
        self._expected: list[_Later] = []
        self._unsent: deque[Sending] = deque()

    def edges(self) -> set[Edge]:
        """All that schedules of this placement use here. In a loop of chunks the last rank sends to the
        first, in a V the second chunk goes back."""
        from megatron.core import parallel_state

        is_v = stage_order.is_v()
        loops = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None and not is_v
        stage = parallel_state.get_pipeline_model_parallel_rank()
        is_last = stage == parallel_state.get_pipeline_model_parallel_world_size() - 1
        found = set()
        for before, after in self._neighbours:
            if loops or stage > 0:
                found |= {self._from(before, FORWARD), self._to(before, BACKWARD)}
            if loops or not is_last:
                found |= {self._to(after, FORWARD), self._from(after, BACKWARD)}
        if is_v:
            found |= {Edge(each.target, each.source, each.lane) for each in found}
        return found

    def communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Sequence[int] | None,
        config: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, list[Any] | None]:
        """See ``seams.transport.Exchange``. A stage with several neighbours gets the sum of what they send.

        Raises ConfigError for what a transport cannot do, and the transport's errors.
        """
        self._check(config)
        if recv_prev or recv_next:
            _require_dtype_and_shape(config, tensor_shape)
        varies = config.variable_seq_lengths
        if varies or not wait_on_reqs:
            self._require_one_pipeline("variable_seq_lengths" if varies else "overlap_p2p_comm")
        shape = None if varies else tensor_shape
        sends: dict[str, list[_Posted]] = {"send_next": [], "send_prev": []}
        receives: dict[str, list[_Later]] = {"recv_prev": [], "recv_next": []}
        for before, after in self._neighbours:
            # Sends first: where a transport copies at once, the neighbour need not wait for what comes next.
            for name, tensor, edge, label in (
                ("send_next", tensor_send_next, self._to(after, FORWARD), _FORWARD),
                ("send_prev", tensor_send_prev, self._to(before, BACKWARD), _BACKWARD),
            ):
                if tensor is not None:
                    sends[name].append(self._send(edge, tensor, with_shape=varies, label=label))
            for name, wanted, edge, label in (
                ("recv_prev", recv_prev, self._from(before, FORWARD), _FORWARD),
                ("recv_next", recv_next, self._from(after, BACKWARD), _BACKWARD),
            ):
                if wanted:
                    receives[name].append(self._expect(edge, shape, config.pipeline_dtype, label))
        if wait_on_reqs:
            # Not for what was sent: transports hold its memory and send it without this thread.
            for expected in receives.values():
                for later in expected:
                    later.wait()
        from_previous, from_next = (_summed([each.tensor for each in receives[name]]) for name in receives)
        if wait_on_reqs:
            return from_previous, from_next, None
        return from_previous, from_next, _in_upstreams_order({**sends, **receives})

    def communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        config: Any,
    ) -> tuple[list[int], list[int]]:
        """See ``seams.transport.Exchange``. With several neighbours upstream has no shapes to give."""
        self._check(config)
        self._require_one_pipeline("variable_seq_lengths")
        ((before, after),) = self._neighbours
        for tensor, edge, label in (
            (tensor_send_next, self._to(after, FORWARD), _FORWARD),
            (tensor_send_prev, self._to(before, BACKWARD), _BACKWARD),
        ):
            if tensor is not None:
                sizes = torch.tensor(tensor.size(), dtype=torch.int64, device=self._device)
                self._send(edge, sizes, with_shape=False, label=label)
        receives = [
            self.transport.post_recv(edge, (_SHAPE_DIMS,), torch.int64, label=label) if wanted else None
            for wanted, edge, label in (
                (recv_prev, self._from(before, FORWARD), _FORWARD),
                (recv_next, self._from(after, BACKWARD), _BACKWARD),
            )
        ]
        found = [[0] * _SHAPE_DIMS if each is None else each.wait().tolist() for each in receives]
        return found[0], found[1]

    def finish(self) -> None:
        for each in tuple(self._expected):
            each.wait()
        while self._unsent:
            self._unsent.popleft().wait()
        self.transport.finish()

    def abandon(self, cause: BaseException | None = None) -> None:
        self._expected.clear()
        self._unsent.clear()
        self.transport.abandon(cause)

    def close(self) -> None:
        self._drain()
        self.transport.close()

    def _drain(self) -> None:
        """Wait for what calls outside a step have sent: Megatron-Core's own are through when they return."""
        deadline = time.monotonic() + CLOSING_SECONDS
        try:
            while self._unsent:
                self._unsent.popleft().wait(max(deadline - time.monotonic(), 0.0))
        except TransportError as error:
            warnings.warn(f"a transfer was not over when its channel was closed: {error}", stacklevel=2)

    def taken(self, later: _Later) -> None:
        """``later`` has its message."""
        self._expected.remove(later)

    def _check(self, config: Any) -> None:
        self.transport.require_open()
        if config.use_ring_exchange_p2p:
            raise ConfigError(
                f"found use_ring_exchange_p2p with the transport {self.transport.name}; expected one of the "
                "two. Leave use_ring_exchange_p2p out, or take --p2p-transport collective"
            )

    def _require_one_pipeline(self, option: str) -> None:
        if len(self._neighbours) > 1:
            raise ConfigError(
                f"found {option} on a rank of {len(self._neighbours)} pipelines; expected it unset, since "
                f"what its neighbours send is summed when it arrives. Leave {option} out, or give encoder "
                "and decoder the same tensor parallel size"
            )

    def _expect(self, edge: Edge, shape: Sequence[int] | None, dtype: torch.dtype, label: Label) -> _Later:
        tensor = torch.empty((0,) if shape is None else tuple(shape), dtype=dtype, device=self._device)
        out = None if shape is None else tensor.detach()
        receiving = self.transport.post_recv(edge, shape, dtype, label=label, out=out)
        later = _Later(self, receiving, tensor.requires_grad_(), has_shape=shape is not None)
        self._expected.append(later)
        return later

    def _send(self, edge: Edge, tensor: Tensor, *, with_shape: bool, label: Label) -> _Posted:
        while self._unsent and (len(self._unsent) >= MOST_UNSENT or self._unsent[0].test()):
            self._unsent.popleft().wait()
        sending = self.transport.post_send(edge, tensor, with_shape=with_shape, label=label)
        self._unsent.append(sending)
        return _Posted(sending)

    def _to(self, peer: int, lane: int) -> Edge:
        return Edge(self._rank, peer, lane)

    def _from(self, peer: int, lane: int) -> Edge:
        return Edge(peer, self._rank, lane)


class _Later:
    """The handle of a message that is received into ``tensor``, which upstream hands out before the message
    is there."""

    def __init__(
        self, exchange: StageExchange, receiving: Receiving, tensor: Tensor, *, has_shape: bool
    ) -> None:
        self.tensor = tensor
        self._has_shape = has_shape
        self._exchange = exchange
        self._receiving: Receiving | None = receiving

    def wait(self) -> None:
        """Return when ``tensor`` holds the message. Again: at once."""
        receiving = self._receiving
        if receiving is None:
            return
        found = receiving.wait()
        self._receiving = None
        if not self._has_shape:
            # Only the sender knew how large it is: the tensor gets the message's memory.
            self.tensor.data = found
        self._exchange.taken(self)

    def is_completed(self) -> bool:
        """True if ``wait`` would return at once; False if not, or if it is not known."""
        return self._receiving is None or self._receiving.test()


class _Posted:
    """The handle of a message that was sent; may be waited for again."""

    def __init__(self, sending: Sending) -> None:
        self._sending: Sending | None = sending

    def wait(self) -> None:
        if self._sending is not None:
            self._sending.wait()
            self._sending = None

    def is_completed(self) -> bool:
        return self._sending is None or self._sending.test()


_EVEN = ("send_next", "recv_prev", "send_prev", "recv_next")
_ODD = ("recv_prev", "send_next", "recv_next", "send_prev")


def _in_upstreams_order(handles: dict[str, list[Any]]) -> list[Any]:
    """As ``_p2p_ops`` orders them, by which events tell whose transfer a handle is."""
    from megatron.core import parallel_state

    order = _ODD if parallel_state.get_pipeline_model_parallel_rank() % 2 else _EVEN
    return [handle for name in order for handle in handles[name]]


def _summed(tensors: Sequence[Tensor]) -> Tensor | None:
    """Upstream's sum of what several neighbours sent: in fp32, of one nothing."""
    if len(tensors) <= 1:
        return tensors[0] if tensors else None
    return torch.stack(list(tensors)).sum(dim=0, dtype=torch.float32).to(tensors[0].dtype)


def _require_dtype_and_shape(config: Any, shape: Sequence[int] | None) -> None:
    if config.pipeline_dtype is None or shape is None:
        raise ConfigError(
            f"found pipeline_dtype {config.pipeline_dtype} and tensor_shape {shape} where a tensor is "
            "received; expected both. Set pipeline_dtype in the model's configuration"
        )


def _neighbours() -> list[tuple[int, int]]:
    """Global ranks of the previous and the next stage, per pipeline of this rank."""
    from megatron.core import parallel_state

    before = parallel_state.get_pipeline_model_parallel_prev_rank()
    after = parallel_state.get_pipeline_model_parallel_next_rank()
    # Lists where a stage of an encoder feeds several decoders.
    return list(zip(_listed(before), _listed(after), strict=True))


def _listed(value: Any) -> Iterable[int]:
    return value if isinstance(value, list) else [value]
