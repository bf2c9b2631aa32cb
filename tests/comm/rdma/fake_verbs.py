"""A fake of the verbs within one process: writes are memory copies, completions are lists.

It proves the bookkeeping and the mapping of errors, never verbs: those are tested in a guest with soft-RoCE
(tests/rdma/run.sh). It keeps the rules that matter: writes of a queue pair happen in order, a write with an
immediate value needs a receive request, memory is reached by its key alone, a queue pair hears its connected
peer alone, after an error everything that follows is flushed and nothing is heard.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections import deque
from typing import Any

import numpy as np

from mt_megatron.comm.rdma import completions
from mt_megatron.comm.rdma.ports import Unusable
from mt_megatron.comm.rdma.verbs import Bytes, Completion, Region


class FakeNetwork:
    """What connects the fakes of one test."""

    def __init__(self) -> None:
        self.pairs: dict[int, FakeQueuePair] = {}
        self.regions: dict[int, FakeRegion] = {}
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.is_cut = False
        """No write reaches its target any more."""

    def device(self, most_requests: int = 1024) -> FakeDevice:
        return FakeDevice(self, most_requests)


class FakeDevice:
    """See ``verbs.Device``."""

    def __init__(self, network: FakeNetwork, most_requests: int) -> None:
        self.where = "fake0 port 1"
        self.most_requests = most_requests
        self.event_fd: int | None = os.eventfd(0, os.EFD_NONBLOCK)
        self.is_active = True
        self.gid_type = "RoCE v2"
        self.closed = False
        self.made: list[FakeQueuePair | FakeRegion] = []
        self._network = network
        self._events: deque[int] = deque()

    def region(self, nbytes: int) -> FakeRegion:
        region = FakeRegion(self._network, nbytes)
        self.made.append(region)
        return region

    def register_dmabuf(self, descriptor: int, nbytes: int) -> Any:
        raise Unusable("the fake registers no dmabuf", "unset MT_MEGATRON_GPU_DIRECT")

    def queue_pair(self, send_depth: int, receive_depth: int) -> FakeQueuePair:
        pair = FakeQueuePair(self._network, send_depth, receive_depth)
        pair.address["gid_type"] = self.gid_type
        self.made.append(pair)
        return pair

    def port_is_active(self) -> bool:
        return self.is_active

    def raise_event(self, event: int) -> None:
        assert self.event_fd is not None
        self._events.append(event)
        os.eventfd_write(self.event_fd, 1)

    def next_event(self) -> int | None:
        assert self.event_fd is not None
        if not self._events:
            return None
        os.eventfd_read(self.event_fd)
        return self._events.popleft()

    def close(self) -> None:
        assert all(each.is_closed for each in self.made), "queue pairs and memory must be closed before"
        self.closed = True


class FakeRegion:
    """See ``verbs.Region``."""

    extra = "of the fake"

    def __init__(self, network: FakeNetwork, nbytes: int) -> None:
        self._view: Bytes = np.zeros(nbytes, dtype=np.uint8)
        self.nbytes = nbytes
        self.address = self._view.ctypes.data
        self.local_key = self.remote_key = next(network.numbers)
        self.is_closed = False
        self._network = network
        network.regions[self.remote_key] = self

    @property
    def bytes(self) -> Bytes:
        return self._view

    def close(self) -> None:
        self.is_closed = True
        self._network.regions.pop(self.remote_key, None)


class FakeQueuePair:
    """See ``verbs.QueuePair``."""

    def __init__(self, network: FakeNetwork, send_depth: int, receive_depth: int) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.address: dict[str, Any] = {"number": next(network.numbers), "link": "Ethernet"}
        self.is_closed = False
        self.most_outstanding = 0
        self.held: deque[tuple[Any, ...]] | None = None
        """Writes that are not carried out until ``release``; None: all are at once."""

        self._network = network
        self._send_depth = send_depth
        self._receive_depth = receive_depth
        self._completions: deque[Completion] = deque()
        self._outstanding = 0
        self._receives = 0
        self._peer = 0
        self._has_failed = False
        network.pairs[self.address["number"]] = self

    def connect(self, remote: dict[str, Any]) -> None:
        self._peer = remote["number"]

    def learn(self, extra: str) -> None:
        assert extra == "of the fake"

    def post_receives(self, count: int) -> None:
        with self._network.lock:
            self._receives += count
            assert self._receives <= self._receive_depth, "more receive requests than the queue holds"

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
        with self._network.lock:
            assert not self.is_closed
            assert offset + nbytes <= region.nbytes
            self._outstanding += 1
            self.most_outstanding = max(self.most_outstanding, self._outstanding)
            assert self._outstanding <= self._send_depth, "more writes than the queue holds"
            work = (request, region, offset, nbytes, remote_address, remote_key, immediate)
            if self.held is not None:
                self.held.append(work)
            else:
                self._carry_out(*work)

    def release(self) -> None:
        """Carry out what is held, and from now on everything at once."""
        with self._network.lock:
            held, self.held = self.held or deque(), None
            for work in held:
                self._carry_out(*work)

    def poll(self, most: int) -> list[Completion]:
        assert not self.is_closed
        with self._network.lock:
            found = [self._completions.popleft() for _ in range(min(most, len(self._completions)))]
            self._outstanding -= sum(not each.is_receive for each in found)
            return found

    def clear_event(self) -> None:
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._network.lock:
            self.is_closed = True
            self._network.pairs.pop(self.address["number"], None)

    def _carry_out(
        self,
        request: int,
        region: Region,
        offset: int,
        nbytes: int,
        address: int,
        key: int,
        value: int | None,
    ) -> None:
        status = self._status(nbytes, address, key, value)
        if status == completions.SUCCESS:
            ctypes.memmove(address, region.address + offset, nbytes)
            if value is not None:
                peer = self._network.pairs[self._peer]
                peer._receives -= 1
                peer._complete(Completion(0, completions.SUCCESS, True, value, nbytes))
        else:
            self._has_failed = True
        self._complete(Completion(request, status, False, 0, 0))

    def _status(self, nbytes: int, address: int, key: int, value: int | None) -> int:
        peer = self._network.pairs.get(self._peer)
        region = self._network.regions.get(key)
        if self._has_failed:
            return completions.FLUSHED
        if peer is None or peer._has_failed or peer._peer != self.address["number"] or self._network.is_cut:
            return completions.RETRIES_EXCEEDED
        if (
            region is None
            or not region.address <= address <= address + nbytes <= region.address + region.nbytes
        ):
            return 10
        if value is not None and not peer._receives:
            return completions.RECEIVER_NOT_READY
        return completions.SUCCESS

    def _complete(self, completion: Completion) -> None:
        self._completions.append(completion)
        os.eventfd_write(self.event_fd, 1)
