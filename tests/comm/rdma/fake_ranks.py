"""Ranks of one process that are connected by a fake of the verbs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mt_megatron.comm.rdma.transport import RdmaTransport, RingSize
from mt_megatron.comm.transport import Edge
from tests.comm.rdma.fake_verbs import FakeNetwork, FakeQueuePair
from tests.comm.rdma.message_traffic import SharedBootstrap

FORTH, BACK = Edge(0, 1, 0), Edge(1, 0, 0)
SMALL = RingSize(slots=4, slot_bytes=1024)


class Pair:
    """Ranks of one process, two by default."""

    def __init__(self, size: RingSize = SMALL, count: int = 2, **options: Any) -> None:
        self.network = FakeNetwork()
        self.devices = [self.network.device() for _ in range(count)]
        self.keys: dict[str, bytes] = {}
        self.ranks = [
            RdmaTransport(
                SharedBootstrap(self.keys, rank),
                size=size,
                timeout=20.0,
                open_device=lambda device=self.devices[rank]: device,
                **options,
            )
            for rank in range(count)
        ]

    def prepare(self, *edges: Edge) -> list[Exception | None]:
        """On all ranks, which wait for each other. Returns the error of each."""
        began = [self.begin_prepare(rank, *edges) for rank in range(len(self.ranks))]
        return [end() for end in began]

    def begin_prepare(self, rank: int, *edges: Edge) -> Callable[[], Exception | None]:
        """In a thread. Returns a function that waits for its end and returns its error."""
        errors: list[Exception | None] = [None]

        def run() -> None:
            try:
                self.ranks[rank].prepare(edges)
            except Exception as error:  # noqa: BLE001 - returned
                errors[0] = error

        def end() -> Exception | None:
            thread.join()
            return errors[0]

        thread = threading.Thread(target=run)
        thread.start()
        return end

    def queue_pair(self, rank: int) -> FakeQueuePair:
        return next(each for each in self.devices[rank].made if isinstance(each, FakeQueuePair))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
