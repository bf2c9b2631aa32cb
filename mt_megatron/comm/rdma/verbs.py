"""Verbs as the links need them, and their implementation over pyverbs, which is imported on use.

pyverbs holds the interpreter's lock in every call, so nothing here may block: event queues are read after
``select`` says that there is something to read.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mt_megatron.comm.rdma.ports import Port, Unusable

Bytes = npt.NDArray[np.uint8]

ACKNOWLEDGE_TIMEOUT = 14
"""Of a packet: 4.096 us x 2 ** 14 = 67 ms, the adapter's clock."""

RETRIES = 6
"""After 7 time-outs of 67 ms, 0.47 s, the peer is lost; an adapter may take up to four times as long. Not 7,
the most there is: soft-RoCE takes that for retries without end, and would never notice a peer's end."""

_RNR_RETRIES = 6
"""7 would be without end."""

_RNR_TIMER = 12
"""0.64 ms before the sender tries again, if the receiver had no request."""

_PSN = 0
"""Packet number to begin with: queue pairs are not reused."""

_SCRATCH_BYTES = 64

# Constants of verbs, whose module in pyverbs changed its name: IBV_QPT_RC, IBV_ACCESS_LOCAL_WRITE |
# IBV_ACCESS_REMOTE_WRITE, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WC_RECV, IBV_PORT_ACTIVE.
_RELIABLE_CONNECTION = 2
_LOCAL_AND_REMOTE_WRITE = 1 | 2
_WRITE, _WRITE_WITH_IMMEDIATE = 0, 1
_RECEIVED = 1 << 7
_PORT_ACTIVE = 4

_INFINIBAND_EVENTS = "anon_inode:[infinibandevent]"


class Completion(NamedTuple):
    """One work completion."""

    request: int
    """The ``request`` of the write; nothing for receives."""

    status: int
    """``ibv_wc_status``: 0 is success."""

    is_receive: bool
    """Whether a write with immediate value arrived. Not known if ``status`` is an error."""

    immediate: int
    nbytes: int
    """Bytes of the write that arrived."""


class Region(Protocol):
    """Registered memory."""

    address: int
    """First byte, as peers and ``write`` name it."""

    nbytes: int
    local_key: int
    remote_key: int

    extra: str
    """What else the peer's ``learn`` needs, for JSON."""

    @property
    def bytes(self) -> Bytes:
        """The memory."""

    def close(self) -> None:
        """Undo the registration."""


class QueuePair(Protocol):
    """A reliable connection with a completion queue of its own."""

    address: dict[str, Any]
    """What the peer's ``connect`` needs; for JSON."""

    event_fd: int
    """Readable when there may be completions."""

    def connect(self, remote: dict[str, Any]) -> None:
        """To ready-to-send."""

    def learn(self, extra: str) -> None:
        """Take note of the ``extra`` of one of the peer's regions, before a write to it."""

    def post_receives(self, count: int) -> None:
        """Requests for ``count`` more writes with immediate values."""

    def write(
        self,
        request: int,
        region: Region,
        offset: int,
        nbytes: int,
        remote_address: int,
        remote_key: int,
        immediate: int | None,
    ) -> None:
        """Write from ``region`` to the peer's memory; its completion has ``request``."""

    def poll(self, most: int) -> list[Completion]:
        """Up to ``most`` completions, in order."""

    def clear_event(self) -> None:
        """Take the event that made ``event_fd`` readable, and ask for the next. Then ``poll`` until empty."""

    def close(self) -> None:
        """Destroy the queue pair, then its queue and channel."""


class Device(Protocol):
    """An open adapter at one port."""

    where: str
    """Adapter, port and address, for messages."""

    event_fd: int | None
    """Readable when there is an asynchronous event; None: these cannot be read."""

    most_requests: int
    """Of a queue."""

    def region(self, nbytes: int) -> Region:
        """New host memory, page-aligned, pre-faulted and registered for local and remote writes."""

    def register_dmabuf(self, descriptor: int, nbytes: int) -> Any:
        """Registration (``lkey``, ``rkey``, ``close()``) of a device's memory. Raises Unusable."""

    def queue_pair(self, send_depth: int, receive_depth: int) -> QueuePair:
        """Not connected."""

    def port_is_active(self) -> bool:
        """Whether the port is up now."""

    def next_event(self) -> int | None:
        """``ibv_event_type`` of the next asynchronous event, taken; None: there is none."""

    def close(self) -> None:
        """After all regions and queue pairs."""


def open_device(port: Port) -> Device:
    """The adapter of ``port`` over pyverbs. Raises Unusable."""
    try:
        from pyverbs import device, pd, pyverbs_error
    except (ImportError, OSError) as error:
        raise Unusable(f"pyverbs cannot be imported: {error}", "install rdma-core's libibverbs1") from error
    try:
        context, event_fd = _with_event_file(lambda: device.Context(name=port.device))
        return _Device(port, context, pd.PD(context), event_fd)
    except pyverbs_error.PyverbsError as error:
        raise Unusable(
            f"{port.device} cannot be opened: {error}",
            "see that libibverbs has the provider of this device (Debian: ibverbs-providers)",
        ) from error


def anonymous_memory(nbytes: int) -> tuple[mmap.mmap, Bytes]:
    """Zeroed private pages, pre-faulted, that a forked process does not inherit: a child's copy-on-write
    would otherwise part the parent's pages from those that the adapter writes to."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    view: Bytes = np.frombuffer(memory, dtype=np.uint8)
    view[:: mmap.PAGESIZE] = 0
    return memory, view


class _Device:
    """See ``Device``."""

    def __init__(self, port: Port, context: Any, domain: Any, event_fd: int | None) -> None:
        self.where = str(port)
        self.event_fd = event_fd
        self._port = port
        self._context = context
        self._domain = domain
        self.most_requests = context.query_device().max_qp_wr
        if event_fd is not None:
            os.set_blocking(event_fd, False)

    def region(self, nbytes: int) -> _Region:
        from pyverbs import mr, pyverbs_error

        _memory, view = anonymous_memory(nbytes)
        try:
            registered = mr.MR(self._domain, nbytes, _LOCAL_AND_REMOTE_WRITE, address=view.ctypes.data)
        except pyverbs_error.PyverbsError as error:
            raise Unusable(
                f"{nbytes} bytes of memory cannot be registered with {self._port.device}: {error}",
                "raise the limit of locked memory (ulimit -l)",
            ) from error
        return _Region(registered, view)

    def register_dmabuf(self, descriptor: int, nbytes: int) -> Any:
        from pyverbs import mr, pyverbs_error

        try:
            return mr.DmaBufMR(self._domain, nbytes, _LOCAL_AND_REMOTE_WRITE, dmabuf=descriptor)
        except pyverbs_error.PyverbsError as error:
            raise Unusable(
                f"{self._port.device} cannot register a dmabuf: {error}",
                "unset MT_MEGATRON_GPU_DIRECT, or update the adapter's driver and rdma-core",
            ) from error

    def queue_pair(self, send_depth: int, receive_depth: int) -> _QueuePair:
        from pyverbs import pyverbs_error

        scratch = self.region(_SCRATCH_BYTES)
        try:
            return _QueuePair(self._context, self._domain, self._port, scratch, send_depth, receive_depth)
        except Unusable:
            scratch.close()
            raise
        except pyverbs_error.PyverbsError as error:
            scratch.close()
            raise Unusable(
                f"{self._port.device} makes no queue pair of {send_depth} requests: {error}",
                "see the kernel log of this machine, or use another transport",
            ) from error

    def port_is_active(self) -> bool:
        return bool(self._context.query_port(self._port.number).state == _PORT_ACTIVE)

    def next_event(self) -> int | None:
        from pyverbs import pyverbs_error

        try:
            event = self._context.get_async_event()
        except pyverbs_error.PyverbsError:
            return None
        event.ack()
        return int(event.event_type)

    def close(self) -> None:
        self._domain.close()
        self._context.close()


class _Region:
    """See ``Region``."""

    extra = ""

    def __init__(self, registered: Any, view: Bytes) -> None:
        self.address = view.ctypes.data
        self.nbytes = view.nbytes
        self.local_key = registered.lkey
        self.remote_key = registered.rkey
        self._registered = registered
        self._view = view

    @property
    def bytes(self) -> Bytes:
        return self._view

    def close(self) -> None:
        self._registered.close()


class _QueuePair:
    """See ``QueuePair``."""

    def __init__(
        self,
        context: Any,
        domain: Any,
        port: Port,
        scratch: _Region,
        send_depth: int,
        receive_depth: int,
    ) -> None:
        from pyverbs import cq, qp, wr

        self._wr = wr
        self._port = port
        self._channel, event_fd = _with_event_file(lambda: cq.CompChannel(context))
        if event_fd is None:
            self._channel.close()
            raise Unusable("the descriptor of a completion channel cannot be found in /proc", "mount /proc")
        self.event_fd = event_fd
        self._queue = cq.CQ(context, send_depth + receive_depth, None, self._channel)
        self._queue.req_notify()
        cap = qp.QPCap(max_send_wr=send_depth, max_recv_wr=receive_depth)
        init = qp.QPInitAttr(qp_type=_RELIABLE_CONNECTION, scq=self._queue, rcq=self._queue, cap=cap)
        attributes = qp.QPAttr(port_num=port.number)
        attributes.qp_access_flags = _LOCAL_AND_REMOTE_WRITE
        self._pair = qp.QP(domain, init, attributes)
        # Writes with immediate values use no memory of a receive request, but pyverbs wants some.
        self._scratch = scratch
        element = wr.SGE(scratch.address, _SCRATCH_BYTES, scratch.local_key)
        self._receive = wr.RecvWR(num_sge=1, sg=[element])
        os.set_blocking(self.event_fd, False)
        state = context.query_port(port.number)
        self.address: dict[str, Any] = {
            "number": self._pair.qp_num,
            "gid": port.gid,
            "lid": state.lid,
            "mtu": int(state.active_mtu),
            "link": port.link,
            "gid_type": port.gid_type,
        }

    def connect(self, remote: dict[str, Any]) -> None:
        from pyverbs import addr, qp

        attributes = qp.QPAttr(port_num=self._port.number)
        attributes.path_mtu = min(self.address["mtu"], int(remote["mtu"]))
        attributes.dest_qp_num = int(remote["number"])
        attributes.sq_psn = attributes.rq_psn = _PSN
        attributes.timeout = _timer("MT_MEGATRON_IB_TIMEOUT", ACKNOWLEDGE_TIMEOUT, 31)
        attributes.retry_cnt = _timer("MT_MEGATRON_IB_RETRY_CNT", RETRIES, 7)
        attributes.rnr_retry = _RNR_RETRIES
        attributes.min_rnr_timer = _RNR_TIMER
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        routed = addr.GlobalRoute(dgid=addr.GID(remote["gid"]), sgid_index=self._port.gid_index, hop_limit=64)
        if self._port.link == "InfiniBand":
            attributes.ah_attr = addr.AHAttr(dlid=int(remote["lid"]), port_num=self._port.number)
        else:
            attributes.ah_attr = addr.AHAttr(gr=routed, is_global=1, port_num=self._port.number)
        self._pair.to_rts(attributes)

    def learn(self, extra: str) -> None:
        """Nothing: an address and a key are enough."""

    def post_receives(self, count: int) -> None:
        for _ in range(count):
            self._pair.post_recv(self._receive)

    def write(
        self,
        request: int,
        region: Region,
        offset: int,
        nbytes: int,
        remote_address: int,
        remote_key: int,
        immediate: int | None,
    ) -> None:
        element = self._wr.SGE(region.address + offset, nbytes, region.local_key)
        work = self._wr.SendWR(
            request,
            _WRITE if immediate is None else _WRITE_WITH_IMMEDIATE,
            num_sge=1,
            imm_data=immediate or 0,
            sg=[element],
        )
        try:
            work.set_wr_rdma(remote_key, remote_address)
            self._pair.post_send(work)
        finally:
            # pyverbs frees neither by itself.
            work.close()
            element.close()

    def poll(self, most: int) -> list[Completion]:
        _, found = self._queue.poll(most)
        return [
            Completion(each.wr_id, each.status, bool(each.opcode & _RECEIVED), each.imm_data, each.byte_len)
            for each in found
        ]

    def clear_event(self) -> None:
        from pyverbs import pyverbs_error

        try:
            self._channel.get_cq_event(self._queue)
        except pyverbs_error.PyverbsError:
            return
        self._queue.ack_events(1)
        self._queue.req_notify()

    def close(self) -> None:
        self._pair.close()
        self._queue.close()
        self._channel.close()
        self._scratch.close()


def _timer(variable: str, default: int, most: int) -> int:
    """A number from the environment; what is no number counts as not set."""
    text = os.environ.get(variable, "")
    return min(int(text), most) if text.isdigit() else default


_opening = threading.Lock()


def _with_event_file(make: Callable[[], Any]) -> tuple[Any, int | None]:
    """What ``make`` returns, and the descriptor for events that it has opened; None if that is not known.

    pyverbs tells neither a device's descriptor for events nor, before rdma-core 50, a completion channel's.
    """
    with _opening:
        before = _event_files()
        made = make()
        found = _event_files() - before
    return made, found.pop() if len(found) == 1 else None


def _event_files() -> set[int]:
    """Descriptors of this process that deliver events of RDMA devices."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _INFINIBAND_EVENTS:
                found.add(int(name))
        except OSError:
            # The descriptor of the listing itself.
            continue
    return found
