"""Random messages in both directions of two jobs at once; run by ``run_ranks``."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mt_megatron.comm.bootstrap import StoreBootstrap
from mt_megatron.comm.shared_memory.ring import RingSize
from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport
from mt_megatron.comm.transport import Edge
from tests.comm.pairs import as_bytes, drawn

LANES = 3
_WINDOW = 4


def two_jobs(seed: int, messages: int, producers: int, helper: str) -> dict[str, Any]:
    """Ranks 0 and 1 are one job, 2 and 3 another; each rank sends ``messages``, from ``producers`` threads,
    over 3 lanes, and checks as many. Returns counts of this rank."""
    dist.init_process_group("gloo")
    rank, job = dist.get_rank() % 2, dist.get_rank() // 2
    store = dist.PrefixStore(f"job{job}", dist.distributed_c10d._get_default_store())
    transport = SharedMemoryTransport(
        StoreBootstrap(store, rank, "traffic"),
        size=RingSize(16384, 8),
        crc=True,
        timeout=120.0,
        helper=helper,
    )
    edges = [Edge(rank, 1 - rank, lane) for lane in range(LANES)]
    transport.prepare([*edges, *(Edge(each.target, each.source, each.lane) for each in edges)])
    began = time.monotonic()
    traffic = Traffic(transport, seed + job, rank, messages)
    traffic.run(producers)
    dist.barrier()
    seconds = time.monotonic() - began
    transport.close()
    return {**traffic.counts, "bytes": traffic.bytes, "seconds": seconds, "pid": os.getpid()}


class Traffic:
    def __init__(self, transport: SharedMemoryTransport, seed: int, rank: int, messages: int) -> None:
        self.transport, self.seed, self.rank, self.messages = transport, seed, rank, messages
        self.errors: list[Exception] = []
        self.counts = {"received": 0, "in place": 0, "wrong": 0}
        self.bytes = 0
        self._next = [0] * LANES
        self._locks = [threading.Lock() for _ in range(LANES)]
        self._counting = threading.Lock()

    def run(self, producers: int) -> None:
        """Send and take everything, by so many threads and one for each lane; raises the first error."""
        works = [(self.produce, each) for each in range(producers)]
        works += [(self.consume, each) for each in range(LANES)]
        threads = [threading.Thread(target=self.guarded, args=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        self.transport.finish()

    def guarded(self, function: Any, argument: int) -> None:
        try:
            function(argument)
        except Exception as error:  # noqa: BLE001 - raised by the rank's main thread.
            self.errors.append(error)
            self.transport.abandon()

    def quota(self, lane: int) -> int:
        return self.messages // LANES + (lane < self.messages % LANES)

    def produce(self, thread: int) -> None:
        """Whoever comes posts a lane's next message, so that all threads share all edges."""
        random = np.random.Generator(np.random.PCG64([self.seed, 99, self.rank, thread]))
        left = set(range(LANES))
        sent: deque[Any] = deque()
        while left:
            lane = int(random.choice(sorted(left)))
            with self._locks[lane]:
                number = self._next[lane]
                if number == self.quota(lane):
                    left.discard(lane)
                    continue
                self._next[lane] += 1
                tensor, label = drawn(self.seed + self.rank, lane, number)
                sent.append(
                    self.transport.post_send(Edge(self.rank, 1 - self.rank, lane), tensor, label=label)
                )
                # As upstream's deallocate_output_tensor does: the storage is the transport's to keep.
                tensor.data = torch.empty((), dtype=tensor.dtype)
            while len(sent) > _WINDOW:
                sent.popleft().wait()
        for each in sent:
            each.wait()

    def consume(self, lane: int) -> None:
        edge, peer = Edge(1 - self.rank, self.rank, lane), 1 - self.rank
        random = np.random.Generator(np.random.PCG64([self.seed, 98, self.rank, lane]))
        posted: deque[Any] = deque()
        received = in_place = wrong = nbytes = 0
        number = 0
        while number < self.quota(lane) or posted:
            while number < self.quota(lane) and len(posted) < _WINDOW:
                expected, label = drawn(self.seed + peer, lane, number)
                shape = None if random.random() < 0.2 else expected.shape
                out = torch.empty_like(as_bytes(expected)) if random.random() < 0.1 else None
                if out is not None:
                    out = out.view(expected.dtype).view(expected.shape) if out.numel() else None
                handle = self.transport.post_recv(edge, shape, expected.dtype, label=label, out=out)
                posted.append((handle, expected))
                number += 1
            handle, expected = posted.popleft()
            kind = random.random()
            if kind < 0.2:
                handle.test()
            if kind < 0.6:
                with handle.lease() as got:
                    wrong += not _same(got, expected)
                    in_place += 1
            else:
                wrong += not _same(handle.wait(), expected)
            received += 1
            nbytes += expected.nbytes
        with self._counting:
            self.counts["received"] += received
            self.counts["in place"] += in_place
            self.counts["wrong"] += wrong
            self.bytes += nbytes


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return (
        got.shape == expected.shape
        and got.dtype == expected.dtype
        and torch.equal(as_bytes(got), as_bytes(expected))
    )
