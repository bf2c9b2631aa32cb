"""Connection of two ranks: one queue pair, and the edges that share it.

Every write carries an immediate value of 32 bits: what it is (2 bits), the lane (12) and the low 16 bits of
a count. DATA: a fragment lies in slot ``count`` of the lane's ring. CREDIT: the receiver of this lane's
messages has copied out ``count`` fragments. BYE: nothing comes after it. A PROBE is a write without immediate
value, which the peer's process does not notice: its adapter's acknowledgement says that the peer is there.

Locks: ``polling`` while completions are handled, then an edge's, then ``_posting``; never the other way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from mt_megatron.comm.bootstrap import Place
from mt_megatron.comm.errors import PeerLost, TransportError
from mt_megatron.comm.rdma import completions
from mt_megatron.comm.rdma.edges import Incoming, Outgoing
from mt_megatron.comm.rdma.ring import COUNT_BITS
from mt_megatron.comm.rdma.verbs import Completion, Device, QueuePair, Region

DATA, CREDIT, BYE, PROBE = range(4)

_LANE_BITS = 12
_LANE_MASK = (1 << _LANE_BITS) - 1
_COUNT_MASK = (1 << COUNT_BITS) - 1

MAILBOX_BYTES = 64
"""Memory at each end that credits and probes are written to: a write needs a destination."""

_SCRATCH_BYTES = 8

_AT_A_TIME = 32
"""Completions per call of ``poll``."""


def pack(kind: int, lane: int = 0, count: int = 0) -> int:
    """Immediate value, and the ``request`` of a write."""
    return kind << (_LANE_BITS + COUNT_BITS) | lane << COUNT_BITS | count & _COUNT_MASK


def unpack(value: int) -> tuple[int, int, int]:
    """Kind, lane and count."""
    return value >> (_LANE_BITS + COUNT_BITS) & 3, value >> COUNT_BITS & _LANE_MASK, value & _COUNT_MASK


class Link:
    """The own end of the connection to one peer."""

    def __init__(self, device: Device, peer: int, depth: int, wake: Callable[[], None]) -> None:
        """``depth``: requests that each queue holds. ``wake``: lets the transport's thread look at
        ``failure``."""
        self.peer = peer
        self.place = Place(peer, "an unknown host", 0, "", "", 0)
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        self.polling = threading.Lock()
        self.failure: TransportError | None = None
        self.was_told = False
        """Whether the edges' waiters know of ``failure``."""

        self.is_connected = False
        self.peer_is_ready = False
        """True once the peer's queue pair is known to receive."""

        self.closed_by_peer = False
        self.mailbox: Region = device.region(MAILBOX_BYTES)
        self.pair: QueuePair = device.queue_pair(depth, depth)
        self._device = device
        self._depth = depth
        self._wake = wake
        self._posting = threading.Lock()
        self._outstanding = 0
        self._backlog: deque[tuple[Any, ...]] = deque()
        self._remote_mailbox = (0, 0)
        self._said_bye = False

    @property
    def hello(self) -> dict[str, Any]:
        """What the peer's ``connect`` needs."""
        return {
            "queue_pair": self.pair.address,
            "mailbox": [self.mailbox.address, self.mailbox.remote_key],
            "extra": self.mailbox.extra,
        }

    def connect(self, place: Place, hello: dict[str, Any], receives: int) -> None:
        """To the peer's end. ``receives``: requests to post before; less than the depth in tests alone."""
        self.place = place
        address, key = hello["mailbox"]
        self._remote_mailbox = (int(address), int(key))
        self.pair.post_receives(receives)
        self.pair.connect(hello["queue_pair"])
        self.pair.learn(hello["extra"])
        self.is_connected = True

    def room(self) -> int:
        """Slots that further edges may have: each slot costs a request of both queues."""
        used = sum(edge.ring.slots for edge in self.outgoing.values())
        used += sum(edge.ring.slots for edge in self.incoming.values())
        # BYE, PROBE and credits that overtake the completion of their predecessor.
        return self._depth - used - 8

    # What is sent.

    def write_fragment(
        self, edge: Outgoing, slot: int, parts: list[tuple[Region, int, int, int, int]]
    ) -> None:
        """Write ``parts`` (region, offset, bytes, remote address, remote key) in order; the last one says
        that slot ``slot`` is full."""
        request = pack(DATA, edge.lane, slot)
        for region, offset, nbytes, address, key in parts[:-1]:
            self._post(request, region, offset, nbytes, address, key, None)
        region, offset, nbytes, address, key = parts[-1]
        self._post(request, region, offset, nbytes, address, key, request)

    def send_credit(self, lane: int, count: int) -> None:
        """Tell the peer that ``count`` fragments of its ``lane`` were copied out."""
        if not self.closed_by_peer and self.failure is None:
            value = pack(CREDIT, lane, count)
            self._post(value, self.mailbox, 0, _SCRATCH_BYTES, *self._remote_mailbox, value)

    def probe(self) -> None:
        """See whether the peer's adapter acknowledges, if no write is on its way that shows it.

        Nothing before ``peer_is_ready``: an adapter drops what comes for a queue pair that is not connected,
        which would look like the peer's end.
        """
        can_write = self.is_connected and self.peer_is_ready and not self._said_bye
        if can_write and not (self._outstanding or self.closed_by_peer or self.failure):
            self._post(pack(PROBE), self.mailbox, 0, _SCRATCH_BYTES, *self._remote_mailbox, None)

    def say_bye(self) -> None:
        """The last write of this end."""
        if self.is_connected and not (self.closed_by_peer or self.failure or self._said_bye):
            self._said_bye = True
            value = pack(BYE)
            self._post(value, self.mailbox, 0, _SCRATCH_BYTES, *self._remote_mailbox, value)

    def is_quiet(self) -> bool:
        """Whether every write is complete."""
        return not self._outstanding and not self._backlog

    def _post(self, *write: Any) -> None:
        with self._posting:
            if self.failure is None and not self.closed_by_peer:
                self._backlog.append(write)
                self._flush()

    def _flush(self) -> None:
        """Post what the queue has room for; with ``_posting``."""
        while self._backlog and self._outstanding < self._depth and self.failure is None:
            try:
                self.pair.write(*self._backlog.popleft())
            except Exception as error:  # noqa: BLE001 - see _fail_in_library
                self._fail_in_library("an error when a write was posted", error)
                return
            self._outstanding += 1

    # What completes.

    def progress(self) -> bool:
        """Handle completions that are there, unless another thread does; whether there were any."""
        if not self.polling.acquire(blocking=False):
            return False
        try:
            return self.is_connected and self._drain()
        finally:
            self.polling.release()

    def handle_event(self) -> None:
        """``progress`` after ``event_fd`` became readable."""
        with self.polling:
            if self.is_connected:
                self._drain(after_event=True)

    def _drain(self, *, after_event: bool = False) -> bool:
        any_found = False
        try:
            if after_event:
                self.pair.clear_event()
            while found := self.pair.poll(_AT_A_TIME):
                any_found = True
                for completion in found:
                    self._handle(completion)
        except Exception as error:  # noqa: BLE001 - see _fail_in_library
            self._fail_in_library("an error when completions were read", error)
        return any_found

    def _handle(self, completion: Completion) -> None:
        if completion.status != completions.SUCCESS:
            # After its BYE the peer destroys its end, and writes that were on their way fail.
            if not self.closed_by_peer and self.failure is None:
                self.fail(
                    completions.failure_of_status(
                        completion.status,
                        self._device.where,
                        self.place,
                        port_is_active=self._port_is_active(),
                    )
                )
            return
        try:
            if completion.is_receive:
                self._handle_arrival(completion)
            else:
                self._handle_write_end(completion.request)
        except TransportError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - of one edge, in the thread of another: all must hear of it
            self.fail(TransportError(f"the link to rank {self.place.rank} failed: {error!r}"))

    def _port_is_active(self) -> bool:
        try:
            return self._device.port_is_active()
        except Exception:  # noqa: BLE001 - an adapter that failed cannot be asked, and its link needs an error
            return False

    def _handle_arrival(self, completion: Completion) -> None:
        self.pair.post_receives(1)
        kind, lane, count = unpack(completion.immediate)
        if kind == DATA and lane in self.incoming:
            self.incoming[lane].arrive(count)
        elif kind == CREDIT and lane in self.outgoing:
            self.outgoing[lane].credit(count)
        elif kind == BYE:
            self.closed_by_peer = True
            self._wake()
        else:
            raise completions.RdmaError(
                self._device.where,
                self.place,
                f"an immediate value of {completion.immediate:08x}",
                "it belongs to no edge",
                "both ranks must run the same schedule and version",
            )

    def _handle_write_end(self, request: int) -> None:
        with self._posting:
            self._outstanding -= 1
            self._flush()
        kind, lane, slot = unpack(request)
        if kind == DATA:
            self.outgoing[lane].acknowledge(slot)

    # The end.

    def fail(self, error: TransportError) -> None:
        """Let every use of the link raise ``error``, if it is the first."""
        if self.failure is None:
            self.failure = error
            self._wake()

    def _fail_in_library(self, what: str, error: Exception) -> None:
        """``fail`` after an error of pyverbs or NIXL, whose classes may not be there to name."""
        self.fail(
            completions.RdmaError(
                self._device.where, self.place, what, str(error), "see the kernel log of this machine"
            )
        )

    def tell(self) -> None:
        """Wake whoever waits at an edge, if the link has ended; the transport's thread alone calls this."""
        if (self.failure is not None or self.closed_by_peer) and not self.was_told:
            self.was_told = True
            for edge in self._edges():
                with edge.changed:
                    edge.changed.notify_all()

    def end(self) -> TransportError | None:
        """Why nothing more will come; None: it may."""
        if self.failure is not None:
            return self.failure
        if self.closed_by_peer:
            return PeerLost(
                self.place.rank,
                self.place.host,
                self.place.pid,
                "it closed its channels while more was expected",
            )
        return None

    def _edges(self) -> list[Outgoing | Incoming]:
        return [*self.outgoing.values(), *self.incoming.values()]

    def close(self) -> None:
        """Destroy the queue pair, then give back the memory."""
        with self.polling:
            self.is_connected = False
            self.pair.close()
            for edge in self._edges():
                edge.close()
            self.mailbox.close()
