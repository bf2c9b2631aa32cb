"""Transport between nodes over RDMA verbs: RoCE v2, InfiniBand, and soft-RoCE for tests."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.backends.base import Backend
from mt_megatron.comm.bootstrap import Bootstrap, Place, has_ended, own_place
from mt_megatron.comm.errors import (
    PeerLost,
    TransferTimeout,
    TransportError,
    TransportUnavailable,
    given_up,
    told,
)
from mt_megatron.comm.rdma import ports, verbs
from mt_megatron.comm.rdma.edges import Incoming, Memory, Outgoing
from mt_megatron.comm.rdma.engine import Engine
from mt_megatron.comm.rdma.gpu_direct import VARIABLE, open_direct
from mt_megatron.comm.rdma.handles import Expected, Sent, source_of, wait_until
from mt_megatron.comm.rdma.link import Link
from mt_megatron.comm.rdma.ports import Unusable
from mt_megatron.comm.rdma.ring import MOST_SLOTS
from mt_megatron.comm.shared_memory.staging import Staging
from mt_megatron.comm.transport import UNLABELLED, Edge, Label
from mt_megatron.errors import ConfigError, MtMegatronError
from mt_megatron.seams import transport as seam

_VERSION = 2
"""Of slots, immediate values and what ranks tell each other."""

_DEPTH = 1024
"""Requests of each queue, if the adapter has as many: 64 rings of 8 slots in each direction."""

_GOODBYE_SECONDS = 1.0
"""For writes that are on their way, and again for the last one, when a transport is closed."""

_LOOK_SECONDS = 0.5
"""Between two looks whether a rank that is waited for has given up."""

_LANES = 1 << 12

_REACH = (
    "see that the two addresses reach each other, with RoCE v2 by UDP port 4791; MT_MEGATRON_IB_HCA and "
    "MT_MEGATRON_IB_GID_INDEX choose others"
)


@dataclass(frozen=True)
class RingSize:
    """Memory of one edge at its receiver; its sender has as much to stage fragments in."""

    slots: int = 8
    """Fragments that may be under way: as many messages, if each fits into a slot."""

    slot_bytes: int = 1 << 20
    """Largest fragment. Multiple of 128."""

    def require(self) -> None:
        """Raise ConfigError for what no ring can have."""
        if not (4 <= self.slots <= MOST_SLOTS and self.slot_bytes >= 128 and self.slot_bytes % 128 == 0):
            raise ConfigError(
                f"found {self}; expected 4 to {MOST_SLOTS} slots of a multiple of 128 bytes; 8 slots of "
                "1 MiB are the default"
            )


class RdmaTransport:
    """See ``transport.Transport``. Calls may come from several threads; messages of an edge have the order
    of their posts, in whichever thread."""

    name = "rdma"

    def __init__(
        self,
        bootstrap: Bootstrap,
        device: torch.device | None = None,
        *,
        backend: Backend | None = None,
        size: RingSize | None = None,
        timeout: float = 600.0,
        crc: bool = False,
        open_device: Callable[[], verbs.Device] | None = None,
        receives: int | None = None,
    ) -> None:
        """``bootstrap``: of this transport alone. ``device``: where received tensors lie (None: the CPU), and
        ``backend``, for another device than the CPU, what knows its streams. ``size``: of the ring of each
        edge that ends here. ``timeout``: seconds of a wait that does not say another, and of ``prepare``.
        ``crc``: add a CRC-32 to messages. ``open_device``: another implementation of the verbs.
        ``receives``: receive requests per link, for tests of what happens if they are too few.

        Raises TransportUnavailable where this process has no adapter to use, and ConfigError for a size that
        no ring can have.
        """
        self._size = RingSize() if size is None else size
        self._size.require()
        self._tensor_device = torch.device("cpu") if device is None else device
        if self._tensor_device.type != "cpu" and backend is None:
            raise ConfigError(
                f"found a transport for {self._tensor_device} without backend=; expected its backend"
            )
        self._staging = Staging(self._tensor_device, backend)
        self._bootstrap = bootstrap
        self._own = bootstrap.rank
        self._timeout = timeout
        self._crc = crc
        self._receives = receives
        self._links: dict[int, Link] = {}
        self._untaken: set[Expected] = set()
        self._preparing = threading.Lock()
        self._ended: str | None = None
        self._is_closed = False
        self._has_given_up = False
        try:
            self._device = (open_device or self._open_device)()
        except Unusable as error:
            raise self._unavailable(error) from error
        try:
            self._direct = open_direct(self._tensor_device, self._device, crc=crc)
        except Unusable as error:
            self._device.close()
            raise self._unavailable(error) from error
        self._engine = Engine(self._device)
        _open.add(self)

    @property
    def where(self) -> str:
        """Adapter, port and address that the transport uses."""
        return self._device.where

    def prepare(self, edges: Iterable[Edge]) -> None:
        with self._preparing:
            self.require_open()
            new = sorted({edge for edge in edges if self._own in edge[:2] and not self._knows(edge)})
            for edge in new:
                if edge.source == edge.target or not 0 <= edge.lane < _LANES:
                    raise ConfigError(
                        f"found {edge}; expected two ranks and a lane of 0 to {_LANES - 1:,}; a rank keeps "
                        "its own tensors without a channel"
                    )
            try:
                self._connect_all(new)
            except BaseException as error:
                # Half of the links are made: no message must be posted to one that is not connected.
                self._end("failed to connect all its edges; make a new one")
                self._give_up(error)
                raise

    def _connect_all(self, new: Sequence[Edge]) -> None:
        deadline = time.monotonic() + self._timeout
        peers = sorted({_other(edge, self._own) for edge in new} - self._links.keys())
        told: set[int] = set()
        try:
            for peer in peers:
                self._links[peer] = Link(self._device, peer, self._depth(), self._engine.wake)
            for edge in new:
                if edge.target == self._own:
                    self._make_ring(edge)
            for peer in peers:
                place = json.loads(own_place(self._own).encode())
                self._publish(
                    f"hello/{self._own}/{peer}",
                    {"version": _VERSION, "place": place, **self._links[peer].hello},
                )
                told.add(peer)
        except (Unusable, ConfigError) as error:
            for peer in set(peers) - told:
                self._publish(f"hello/{self._own}/{peer}", {"unusable": str(error)})
            if isinstance(error, ConfigError):
                raise
            raise self._unavailable(error) from error
        for peer in peers:
            self._connect(peer, deadline)
        for edge in new:
            if edge.source == self._own:
                self._take_ring(edge, deadline)
        # A write that comes before the peer's queue is ready costs retries, then the link.
        for peer in peers:
            self._publish(f"ready/{self._own}/{peer}", {})
        for peer in peers:
            self._fetch(f"ready/{peer}/{self._own}", peer, deadline)
            self._links[peer].peer_is_ready = True
            self._links[peer].probe()
        # A queue pair becomes ready without a packet: the first write shows whether the network carries any.
        for peer in peers:
            self._require_acknowledged(peer, deadline)

    def post_send(
        self, edge: Edge, tensor: Tensor, *, with_shape: bool = False, label: Label = UNLABELLED
    ) -> Sent:
        self.require_open()
        link = self._links.get(edge.target)
        outgoing = None if link is None or edge.source != self._own else link.outgoing.get(edge.lane)
        if outgoing is None:
            raise self._unknown(edge)
        source = source_of(tensor, label, self._crc, self._staging, self._direct)
        return Sent(edge, outgoing, outgoing.post(source), self._timeout)

    def post_recv(
        self,
        edge: Edge,
        shape: Sequence[int] | None,
        dtype: torch.dtype,
        *,
        label: Label = UNLABELLED,
        out: Tensor | None = None,
    ) -> Expected:
        self.require_open()
        link = self._links.get(edge.source)
        incoming = None if link is None or edge.target != self._own else link.incoming.get(edge.lane)
        if incoming is None:
            raise self._unknown(edge)
        expected = Expected(
            edge,
            incoming,
            shape,
            dtype,
            label,
            out,
            self._staging,
            self._direct,
            self._timeout,
            self._untaken,
        )
        incoming.post(expected.arrival)
        return expected

    def finish(self) -> None:
        self.require_open()
        missing = list(self._untaken)
        if missing:
            raise MtMegatronError(
                f"{len(missing)} transfer(s) were made ready for and not taken, the first from rank "
                f"{min(each.edge for each in missing).source}; the schedule was not checked before it ran"
            )
        deadline = time.monotonic() + self._timeout
        for link in self._links.values():
            for edge in link.outgoing.values():
                wait_until(
                    edge, edge.is_over, link.end, deadline, f"messages to rank {link.peer}", edge.waiting
                )
                if edge.failure is not None:
                    raise edge.failure

    def abandon(self, cause: BaseException | None = None) -> None:
        with self._preparing:
            self._end(given_up(cause))
            for link in self._links.values():
                link.say_bye()
            self._give_up(cause)

    def close(self) -> None:
        with self._preparing:
            if self._is_closed:
                return
            self._is_closed = True
            self._end("is closed; make a new one")
            # In this order: data, farewell, threads, queue pairs, memory, device.
            self._wait_for_writes()
            for link in self._links.values():
                link.say_bye()
            self._wait_for_writes()
            self._engine.stop()
            for link in self._links.values():
                link.close()
            self._links.clear()
            self._device.close()
            _open.discard(self)

    def left_by_fork(self) -> None:
        """In a forked process: the channels are the parent's, whose threads and memory are not here."""
        self._ended = "belongs to the process that this one was forked from; make a new one"
        self._is_closed = True
        # A lock that a thread of the parent held: that thread is not here to release it.
        self._preparing = threading.Lock()
        _open.discard(self)
        # Destroying these objects would tell the kernel to destroy the parent's.
        # Closing descriptors would not let go of them: mappings of the adapter's queues hold its file too.
        _of_parents.append(self)

    @staticmethod
    def _open_device() -> verbs.Device:
        return verbs.open_device(ports.why_unusable())

    def _unavailable(self, error: Unusable) -> TransportUnavailable:
        return TransportUnavailable(self.name, str(error), error.change)

    # prepare

    def _depth(self) -> int:
        return min(_DEPTH, self._device.most_requests)

    def _knows(self, edge: Edge) -> bool:
        link = self._links.get(_other(edge, self._own))
        if link is None:
            return False
        return edge.lane in (link.outgoing if edge.source == self._own else link.incoming)

    def _memory(self, slots: int, slot_bytes: int) -> Memory:
        return Memory(self._device, slots, slot_bytes, None if self._direct is None else self._direct.region)

    def _make_ring(self, edge: Edge) -> None:
        link = self._links[edge.source]
        self._require_room(link, self._size.slots)
        incoming = Incoming(link, edge.lane, self._memory(self._size.slots, self._size.slot_bytes))
        link.incoming[edge.lane] = incoming
        self._publish(_ring_key(edge), incoming.offer)

    def _take_ring(self, edge: Edge, deadline: float) -> None:
        link = self._links[edge.target]
        offer = self._fetch(_ring_key(edge), edge.target, deadline)
        if offer["is_one"] != (self._direct is None):
            raise TransportUnavailable(
                self.name,
                f"rank {edge.target} and rank {self._own} do not both use GPUDirect",
                f"set {VARIABLE} on all ranks or on none",
            )
        self._require_room(link, int(offer["slots"]))
        try:
            memory = self._memory(int(offer["slots"]), int(offer["slot_bytes"]))
        except Unusable as error:
            raise self._unavailable(error) from error
        link.outgoing[edge.lane] = Outgoing(link, edge.lane, memory, offer, self._engine.defer)

    def _connect(self, peer: int, deadline: float) -> None:
        link = self._links[peer]
        hello = self._fetch(f"hello/{peer}/{self._own}", peer, deadline)
        if "unusable" in hello:
            raise TransportUnavailable(
                self.name, f"rank {peer}: {hello['unusable']}", "use --p2p-transport auto or collective"
            )
        theirs, own = _network(hello["queue_pair"]), _network(link.pair.address)
        if hello["version"] != _VERSION or theirs != own:
            raise TransportUnavailable(
                self.name,
                f"rank {peer} speaks version {hello['version']} over {theirs}, rank {self._own} version "
                f"{_VERSION} over {own}",
                "give both adapters of one network (MT_MEGATRON_IB_HCA), GIDs of one type "
                "(MT_MEGATRON_IB_GID_INDEX) and one version of mt_megatron",
            )
        receives = self._depth() if self._receives is None else self._receives
        try:
            link.connect(Place(**hello["place"]), hello, receives)
        except Exception as error:
            raise TransportUnavailable(
                self.name,
                f"no connection from {self._device.where} to rank {peer}: {error}",
                _REACH,
            ) from error
        self._engine.add(link)

    def _require_acknowledged(self, peer: int, deadline: float) -> None:
        """Raise TransportUnavailable if the first write to ``peer`` fails or is not over by ``deadline``."""
        link = self._links[peer]
        _settle(link, deadline)
        # A peer that has already closed said so over this link.
        if link.closed_by_peer or (link.failure is None and link.is_quiet()):
            return
        why = "it is not acknowledged" if link.failure is None else str(link.failure)
        raise TransportUnavailable(
            self.name, f"the first write over {self._device.where} to rank {peer} failed: {why}", _REACH
        ) from link.failure

    def _require_room(self, link: Link, slots: int) -> None:
        if link.room() < slots:
            raise ConfigError(
                f"found more edges between ranks {self._own} and {link.peer} than one queue pair of "
                f"{self._depth()} requests serves, with {slots} slots each; expected fewer: take a ring of "
                "fewer slots, or --p2p-transport collective"
            )

    def _publish(self, key: str, value: dict[str, Any]) -> None:
        self._bootstrap.publish(key, json.dumps(value).encode())

    def _fetch(self, key: str, peer: int, deadline: float) -> dict[str, Any]:
        """Value that ``peer`` publishes under ``key``. Raises PeerLost where it gives up instead."""
        while True:
            left = max(0.1, deadline - time.monotonic())
            try:
                value: dict[str, Any] = json.loads(self._bootstrap.fetch(key, min(left, _LOOK_SECONDS)))
                return value
            except TransferTimeout:
                self._require_there(peer)
                if time.monotonic() > deadline:
                    raise TransferTimeout(
                        f"rank {self._own} waited {self._timeout:.3g} s for {key!r} of rank {peer}; see what "
                        "that rank's process says, or raise the time-out"
                    ) from None

    def _require_there(self, peer: int) -> None:
        """Raise PeerLost if ``peer`` has given up, its link has ended, or its process here has."""
        link = self._links[peer]
        ended = link.end()
        if ended is not None:
            raise ended
        try:
            found = json.loads(self._bootstrap.fetch(f"gave_up/{peer}", 0.0))
        except TransferTimeout:
            if has_ended(link.place):
                raise PeerLost(peer, link.place.host, link.place.pid, "its process ended") from None
            return
        place = Place(**found["place"])
        raise PeerLost(place.rank, place.host, place.pid, f"it gave up its channels ({found['said']})")

    def _give_up(self, cause: BaseException | None) -> None:
        """Tell ranks that wait for this one to connect, if the store is still there."""
        if self._has_given_up:
            return
        self._has_given_up = True
        place = json.loads(own_place(self._own).encode())
        said = "after an error" if cause is None else told(cause)
        with contextlib.suppress(Exception):
            self._publish(f"gave_up/{self._own}", {"place": place, "said": said})

    # The end.

    def _end(self, why: str) -> None:
        if self._ended is None:
            self._ended = why
        error = TransportError(f"this transport {self._ended}")
        for link in self._links.values():
            for edge in link.outgoing.values():
                edge.abandon(error)
            for expected in link.incoming.values():
                expected.abandon(error)
        self._untaken.clear()

    def _wait_for_writes(self) -> None:
        deadline = time.monotonic() + _GOODBYE_SECONDS
        for link in self._links.values():
            _settle(link, deadline)

    def require_open(self) -> None:
        if self._ended is not None:
            raise TransportError(f"this transport {self._ended}")

    def _unknown(self, edge: Edge) -> MtMegatronError:
        return MtMegatronError(
            f"found a message for {edge} on rank {self._own}, which was not prepared; give all edges of a "
            "schedule to prepare()"
        )


def unavailable_here() -> str | None:
    """Why no rank of this machine can use RDMA; None where it can. Opens nothing."""
    return ports.usable()


def _settle(link: Link, deadline: float) -> None:
    """Return when every write of ``link`` is complete, when it has ended, or after ``deadline``."""
    while not link.is_quiet() and link.end() is None and time.monotonic() < deadline:
        if not link.progress():
            time.sleep(0.001)


def _network(queue_pair: dict[str, Any]) -> str:
    """Link layer of a queue pair's port, with the type of its GID where there are several."""
    link: str = queue_pair["link"]
    gid_type = queue_pair.get("gid_type", link)
    return link if gid_type == link else f"{link} ({gid_type})"


def _ring_key(edge: Edge) -> str:
    return f"ring/{edge.source}/{edge.target}/{edge.lane}"


def _other(edge: Edge, own: int) -> int:
    return edge.target if edge.source == own else edge.source


_open: weakref.WeakSet[RdmaTransport] = weakref.WeakSet()
_of_parents: list[RdmaTransport] = []


def _after_fork() -> None:
    for transport in list(_open):
        transport.left_by_fork()


def _at_exit() -> None:
    if not _open:
        return
    # The exchange closes first: it waits for messages that have no room in a ring yet. Its own hook would run
    # later, as hooks run from the last one that was registered to the first.
    try:
        seam.close()
    finally:
        # Queue pairs must not outlive the threads that serve them.
        for transport in list(_open):
            transport.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
