"""Messages as tensors: what is sent, what is expected, and the waiting for both."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mt_megatron.comm.errors import TransferTimeout, TransportError
from mt_megatron.comm.message import Header
from mt_megatron.comm.rdma.edges import Arrival, Departure, Incoming, Outgoing, Sink, Slot, Source
from mt_megatron.comm.rdma.gpu_direct import DirectMemory, DirectSink, DirectSource
from mt_megatron.comm.rdma.verbs import Bytes
from mt_megatron.comm.shared_memory.staging import Staged, Staging
from mt_megatron.comm.shared_memory.tensors import Unwritten, bytes_of, copy_of, in_rows, is_part
from mt_megatron.comm.transport import UNLABELLED, Edge, Label, Owned
from mt_megatron.errors import MtMegatronError

_SPIN_SECONDS = 50e-6
"""A waiting thread handles completions itself for so long before it sleeps: a message that is about to arrive
costs no switch of threads."""


def wait_until(
    edge: Outgoing | Incoming,
    is_over: Callable[[], bool],
    end: Callable[[], TransportError | None],
    deadline: float,
    what: str,
    left: Callable[[], int],
) -> None:
    """Return when ``is_over``; raise what ``end`` returns, or TransferTimeout after ``deadline``
    (``time.monotonic``). ``what`` and ``left`` (messages) describe it."""
    began = time.monotonic()
    while not is_over():
        error = end()
        if error is not None:
            # Another thread may have handled the message and the peer's end in between.
            if is_over():
                return
            raise error
        if edge.link.progress() or time.monotonic() - began < _SPIN_SECONDS:
            continue
        with edge.changed:
            remaining = deadline - time.monotonic()
            if not is_over() and end() is None:
                if remaining <= 0:
                    place = edge.link.place
                    raise TransferTimeout(
                        f"{what}, lane {edge.lane}, took longer than {deadline - began:.3g} s, while its "
                        f"adapter answers: {left()} message(s) wait; see what that process (process "
                        f"{place.pid} on {place.host}) does, or raise the time-out"
                    )
                edge.changed.wait(remaining)


def source_of(
    tensor: Tensor, label: Label, crc: bool, staging: Staging, direct: DirectMemory | None
) -> Source:
    """A message of ``tensor``, which may lie on a device. Raises MtMegatronError for what cannot be sent."""
    # A dtype or shape without a code is refused here, not in another thread.
    Header(0, tensor.dtype, tuple(tensor.shape), label).encode()
    if tensor.device.type == "cpu":
        return _HostSource(tensor, label, crc)
    if direct is not None:
        return DirectSource(tensor, label, direct)
    return _DeviceSource(tensor, label, crc, staging.to_host(tensor))


class _HostSource:
    """See ``edges.Source``. It keeps the storage, whatever becomes of the tensor's ``.data``."""

    waits = False

    def __init__(self, tensor: Tensor, label: Label, crc: bool) -> None:
        self._tensor = in_rows(tensor)
        self._label = label
        self._crc = crc
        self._bytes = _as_array(self._tensor)
        self.nbytes = self._bytes.nbytes
        self._unwritten: Unwritten | None = Unwritten(self._tensor, tensor)

    def await_device(self) -> None:
        """Nothing: it is the host's."""

    def hold(self) -> None:
        """Copy what is a part of a storage, whose other parts may be written to."""
        if is_part(self._tensor):
            self._tensor, self._unwritten = copy_of(self._tensor), None
            self._bytes = _as_array(self._tensor)

    def header(self, sequence: int) -> bytes:
        crc = zlib.crc32(self._bytes.data) if self._crc else None
        return Header(sequence, self._tensor.dtype, tuple(self._tensor.shape), self._label, crc).encode()

    def read(self, offset: int, slot: Slot, nbytes: int) -> None:
        slot.region.bytes[slot.offset : slot.offset + nbytes] = self._bytes[offset : offset + nbytes]

    def finish(self, target: int) -> None:
        if self._unwritten is not None:
            self._unwritten.require(target)


class _DeviceSource:
    """See ``edges.Source``: a copy to pinned host memory that is under way."""

    def __init__(self, tensor: Tensor, label: Label, crc: bool, staged: Staged) -> None:
        self.waits = True
        self.nbytes = tensor.nbytes
        self._staged = staged
        self._label = label
        self._crc = crc
        self._host: _HostSource | None = None

    def await_device(self) -> None:
        self._host = _HostSource(self._staged.wait(), self._label, self._crc)
        self.waits = False

    def header(self, sequence: int) -> bytes:
        assert self._host is not None
        return self._host.header(sequence)

    def read(self, offset: int, slot: Slot, nbytes: int) -> None:
        assert self._host is not None
        self._host.read(offset, slot, nbytes)

    def hold(self) -> None:
        """Nothing: what is read is a copy."""

    def finish(self, target: int) -> None:
        if self._staged.unwritten is not None:
            self._staged.unwritten.require(target)


class Sent:
    """See ``transport.Sending``: over when the message is in registered memory."""

    def __init__(self, edge: Edge, outgoing: Outgoing, departure: Departure, timeout: float) -> None:
        self.edge = edge
        self._outgoing = outgoing
        self._departure = departure
        self._timeout = timeout

    def test(self) -> bool:
        if not self._departure.is_staged:
            self._outgoing.link.progress()
            error = self._end()
            if error is not None and not self._departure.is_staged:
                raise error
        return self._departure.is_staged

    def wait(self, timeout: float | None = None) -> None:
        wait_until(
            self._outgoing,
            lambda: self._departure.is_staged,
            self._end,
            time.monotonic() + (self._timeout if timeout is None else timeout),
            f"a message to rank {self.edge.target}",
            self._outgoing.waiting,
        )

    def _end(self) -> TransportError | None:
        return self._outgoing.failure or self._outgoing.link.end()


class _Sink:
    """See ``edges.Sink``: memory of the host."""

    def __init__(self, edge: Edge, header: Header, host: Tensor) -> None:
        self.host = host
        self.nbytes = header.nbytes
        self._edge = edge
        self._header = header
        self._bytes = _as_array(host)

    def write(self, offset: int, slot: Slot, nbytes: int) -> None:
        self._bytes[offset : offset + nbytes] = slot.region.bytes[slot.offset : slot.offset + nbytes]

    def finish(self) -> None:
        self._header.require_crc(self._edge, self._bytes.data)


class Expected:
    """See ``transport.Receiving``."""

    def __init__(
        self,
        edge: Edge,
        incoming: Incoming,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
        label: Label,
        out: Tensor | None,
        staging: Staging,
        direct: DirectMemory | None,
        timeout: float,
        untaken: set[Expected],
    ) -> None:
        """``untaken``: has this handle until its message was taken."""
        if out is not None and not (
            out.is_contiguous() and out.dtype == dtype and (shape is None or tuple(shape) == tuple(out.shape))
        ):
            raise MtMegatronError(
                f"found out= of {out.dtype}, shape {tuple(out.shape)} and strides {out.stride()}; expected a "
                f"contiguous tensor of {dtype} and shape {shape}"
            )
        if out is not None and staging.device.type == "cpu" and out.device.type != "cpu":
            raise MtMegatronError(
                f"found out= on {out.device}; expected memory of the host, where this channel receives. "
                "Leave out= away"
            )
        self.edge = edge
        self.label = UNLABELLED
        self.arrival = Arrival(self._begin)
        self._incoming = incoming
        self._shape = shape if shape is not None or out is None else tuple(out.shape)
        self._dtype = dtype
        self._wanted = label
        self._found = UNLABELLED
        self._out = out
        self._staging = staging
        self._direct = direct
        # ``out`` may be written behind the work that is queued by now.
        self._stream = None if direct is None else direct.stream()
        self._ready = None if direct is None or out is None else direct.mark(self._stream)
        self._timeout = timeout
        self._host: Tensor | None = None
        self._untaken = untaken
        untaken.add(self)

    def test(self) -> bool:
        if not self.arrival.is_over:
            self._incoming.link.progress()
            error = self._end()
            if error is not None and not self.arrival.is_over:
                raise error
        return self.arrival.is_over

    def wait(self, timeout: float | None = None) -> Tensor:
        wait_until(
            self._incoming,
            lambda: self.arrival.is_over,
            self._end,
            time.monotonic() + (self._timeout if timeout is None else timeout),
            f"a message from rank {self.edge.source}",
            self._incoming.expected,
        )
        host, self._host = self._host, None
        if host is None:
            raise MtMegatronError(f"the message from rank {self.edge.source} was taken before")
        self._untaken.discard(self)
        self.label = self._found
        if self._staging.device.type == "cpu" or self._direct is not None:
            return host
        return self._staging.to_device(host, self._out)

    def lease(self, timeout: float | None = None) -> Owned:
        return Owned(self.wait(timeout))

    def _begin(self, encoded: bytes, sequence: int) -> Sink:
        header = Header.decode(encoded)
        header.require(self.edge, sequence=sequence, shape=self._shape, dtype=self._dtype, label=self._wanted)
        self._found = header.label
        if self._direct is not None:
            self._host, ready = self._out, self._ready
            if self._host is None:
                self._host, ready = self._direct.empty(header.shape, header.dtype, self._stream)
            return DirectSink(self._host, self._direct, ready)
        if self._staging.device.type != "cpu":
            self._host = self._staging.host_memory(header.shape, header.dtype)
        elif self._out is not None:
            self._host = self._out
        else:
            self._host = torch.empty(header.shape, dtype=header.dtype)
        return _Sink(self.edge, header, self._host)

    def _end(self) -> TransportError | None:
        return self._incoming.failure or self._incoming.link.end()


def _as_array(tensor: Tensor) -> Bytes:
    """The elements of a host tensor in rows, as bytes; the tensor must outlive it."""
    return np.frombuffer(bytes_of(tensor), dtype=np.uint8)
