"""Transport between the ranks of one machine over rings in shared memory."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mt_megatron.backends.base import Backend
from mt_megatron.comm.bootstrap import Bootstrap
from mt_megatron.comm.errors import TransportError, TransportUnavailable, given_up, told
from mt_megatron.comm.shared_memory import memory, native
from mt_megatron.comm.shared_memory.incoming import Expected, Incoming
from mt_megatron.comm.shared_memory.native import NativeConsumer, NativeProducer
from mt_megatron.comm.shared_memory.outgoing import Outgoing, Queued, Sent, closed
from mt_megatron.comm.shared_memory.peers import Peers, pass_rings
from mt_megatron.comm.shared_memory.plain import PlainConsumer, PlainProducer
from mt_megatron.comm.shared_memory.protocol import MAGIC, PAGE, VERSION
from mt_megatron.comm.shared_memory.ring import RingSize
from mt_megatron.comm.shared_memory.staging import Staging
from mt_megatron.comm.transport import UNLABELLED, Edge, Label
from mt_megatron.errors import ConfigError, MtMegatronError

_CHANGE = "use --p2p-transport auto or collective"


class SharedMemoryTransport:
    """See ``transport.Transport``. Calls may come from several threads; messages of an edge have the order
    of their posts, in whichever thread.

    ``wait`` copies out; ``lease`` gives a message of up to ``size.slots * size.slot_bytes`` in place. An
    outstanding lease holds back the credits of all later messages of its edge.
    """

    name = "shm"

    def __init__(
        self,
        bootstrap: Bootstrap,
        *,
        device: torch.device | None = None,
        backend: Backend | None = None,
        size: RingSize | None = None,
        timeout: float = 600.0,
        crc: bool = False,
        helper: str = "auto",
    ) -> None:
        """``bootstrap``: of this transport alone. ``device``: where received tensors lie (None: the CPU), and
        ``backend``, for another device than the CPU, what knows its streams. ``size``: of each edge's ring;
        the same on all ranks, like ``crc``, which adds a CRC-32 to messages. ``timeout``: seconds of a wait
        that does not say another, and of ``prepare``. ``helper``: ``native``, ``python`` or ``auto``.

        Raises TransportUnavailable where this machine has no such memory, and ConfigError for a size that no
        ring can have.
        """
        self._device = torch.device("cpu") if device is None else device
        self._size = RingSize() if size is None else size
        _require(self._size)
        if self._device.type != "cpu" and backend is None:
            raise ConfigError(f"found a transport for {self._device} without backend=; expected its backend")
        self._producer, self._consumer = _ends(helper)
        self._timeout = timeout
        self._crc = crc
        self._staging = Staging(self._device, backend)
        self._outgoing: dict[Edge, Outgoing] = {}
        self._incoming: dict[Edge, Incoming] = {}
        self._preparing = threading.Lock()
        self._ended: str | None = None
        self._own = bootstrap.rank
        try:
            self._peers = Peers(bootstrap)
        except OSError as error:
            raise TransportUnavailable("shm", f"no Unix socket can be made ({error})", _CHANGE) from error
        _open.add(self)

    @property
    def helper(self) -> str:
        """``native`` or ``python``: what works the rings."""
        return "python" if self._producer is PlainProducer else "native"

    def prepare(self, edges: Iterable[Edge]) -> None:
        with self._preparing:
            self.require_open()
            known = self._outgoing.keys() | self._incoming.keys()
            new = sorted({edge for edge in edges if self._own in edge[:2]} - known)
            if not new:
                return
            for edge in new:
                if edge.source == edge.target or not 0 <= edge.lane < 4096:
                    raise ConfigError(
                        f"found {edge}; expected two ranks and a lane of 0 to 4,095; a rank keeps its own "
                        "tensors without a channel"
                    )
            deadline = time.monotonic() + self._timeout
            self._peers.connect({_other(edge, self._own) for edge in new}, deadline)
            facts = {"slots": self._size.slots, "slot_bytes": self._size.slot_bytes, "version": VERSION}
            try:
                pass_rings(self._peers, self._own, new, self._make, self._take, facts, deadline)
            except TransportError:
                for edge in new:
                    self._outgoing.pop(edge, None)
                    self._incoming.pop(edge, None)
                raise

    def post_send(
        self, edge: Edge, tensor: Tensor, *, with_shape: bool = False, label: Label = UNLABELLED
    ) -> Sent | Queued:
        outgoing = self._outgoing.get(edge)
        if outgoing is None:
            raise self._unknown(edge)
        return outgoing.post(tensor, label)

    def post_recv(
        self,
        edge: Edge,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
        *,
        label: Label = UNLABELLED,
        out: Tensor | None = None,
    ) -> Expected:
        incoming = self._incoming.get(edge)
        if incoming is None:
            raise self._unknown(edge)
        return incoming.post(shape, dtype, label, out)

    def finish(self) -> None:
        self.require_open()
        missing = {edge: each.unfinished() for edge, each in self._incoming.items() if each.unfinished()}
        if missing:
            raise MtMegatronError(
                f"{sum(missing.values())} transfer(s) were made ready for and not taken, the first from rank "
                f"{min(missing).source}; the schedule was not checked before it ran"
            )
        for outgoing in self._outgoing.values():
            outgoing.wait(None, None)

    def abandon(self, cause: BaseException | None = None) -> None:
        self._end("abandon", given_up(cause), None if cause is None else told(cause))

    def close(self) -> None:
        self._end("close", "is closed; make a new one")

    def left_by_fork(self) -> None:
        """In a forked process: the channels are the parent's, and their memory is not mapped here."""
        self._ended = "belongs to the process that this one was forked from; make a new one"
        ends: list[Outgoing | Incoming] = [*self._outgoing.values(), *self._incoming.values()]
        for end in ends:
            end.forget(closed(end.edge, self._ended))
        self._peers.drop()

    def _end(self, farewell: str, why: str, said: str | None = None) -> None:
        """``said``: to the peers, beside ``farewell``."""
        with self._preparing:
            if self._ended is not None:
                return
            self._ended = why
            ends: list[Outgoing | Incoming] = [*self._outgoing.values(), *self._incoming.values()]
            for end in ends:
                end.end(closed(end.edge, why))
            self._peers.close(farewell, said)
            # The memory goes with its last tensor.
            self._outgoing.clear()
            self._incoming.clear()

    def require_open(self) -> None:
        if self._ended is not None:
            raise TransportError(f"this transport {self._ended}")

    def _unknown(self, edge: Edge) -> MtMegatronError:
        self.require_open()
        return MtMegatronError(
            f"found a message for {edge} on rank {self._own}, which was not prepared; give all edges of a "
            "schedule to prepare()"
        )

    def _make(self, edge: Edge) -> int:
        descriptor = memory.create(self._size.nbytes)
        try:
            mapping = memory.Mapping(descriptor, self._size.nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        mapping.view(0, 8).cast("I")[0] = MAGIC
        mapping.view(0, 8).cast("I")[1] = VERSION
        self._incoming[edge] = Incoming(
            edge,
            self._consumer(mapping, self._size),
            mapping,
            self._size,
            self._peers[edge.source],
            self._staging,
            self._timeout,
        )
        return descriptor

    def _take(self, edge: Edge, descriptor: int) -> None:
        try:
            memory.check(descriptor, self._size.nbytes)
            mapping = memory.Mapping(descriptor, self._size.nbytes)
        finally:
            os.close(descriptor)
        self._outgoing[edge] = Outgoing(
            edge,
            self._producer(mapping, self._size),
            self._peers[edge.target],
            self._staging,
            self._timeout,
            self._crc,
        )


def unavailable_here() -> str | None:
    """Why no rank of this machine can use shared memory; None where it can."""
    if native.describe()["uses"] == "none":
        return str(native.describe()["why"])
    try:
        os.close(memory.create(PAGE))
    except TransportUnavailable as error:
        return error.reason
    return None


def _ends(helper: str) -> tuple[Any, Any]:
    if helper not in ("auto", "native", "python"):
        raise ConfigError(f"found helper={helper!r}; expected 'auto', 'native' or 'python'")
    loaded, refused = native.load(), native.why_not_plain()
    if helper != "python" and not isinstance(loaded, str):
        return NativeProducer, NativeConsumer
    if helper == "native":
        raise TransportUnavailable("shm", f"the C helper is missing: {loaded}", _CHANGE)
    if refused is not None:
        change = f"build the helper ({native.build_command()}) or {_CHANGE}"
        raise TransportUnavailable("shm", f"{refused}, and the C helper is missing", change)
    return PlainProducer, PlainConsumer


def _require(size: RingSize) -> None:
    if size.slots < 2 or size.slot_bytes < PAGE or size.slot_bytes % PAGE:
        raise ConfigError(
            f"found {size}; expected at least 2 slots of a multiple of {PAGE} bytes; 8 slots of 512 KiB are "
            "the default"
        )


def _other(edge: Edge, own: int) -> int:
    return edge.target if edge.source == own else edge.source


_open: weakref.WeakSet[SharedMemoryTransport] = weakref.WeakSet()


def _after_fork() -> None:
    for transport in list(_open):
        transport.left_by_fork()


os.register_at_fork(after_in_child=_after_fork)
