"""Messages in place, in the ring's memory, one function each; run by ``ranks.several``."""

from __future__ import annotations

from typing import Any

import torch

from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport as Transport
from mt_megatron.comm.transport import Edge, Owned
from mt_megatron.errors import MtMegatronError
from tests.comm.pairs import BACK, FLOAT, RING, THERE, await_ready, raises, run_pair, signal_ready


def leases_are_in_place(helper: str) -> None:
    """The tensor lies in the ring, its credit comes back when the lease ends, in whatever order."""

    def first(transport: Transport) -> list[bool]:
        for value in range(4):
            transport.post_send(THERE, torch.full((2048,), float(value)))  # Two slots each.
        more = transport.post_send(THERE, torch.full((2048,), 4.0))
        transport.post_send(Edge(0, 1, 1), torch.ones(1))
        was_out = more.test()
        await_ready(transport)
        still = more.test()
        signal = transport.post_send(Edge(0, 1, 1), torch.ones(1))
        signal.wait()
        more.wait()
        return [was_out, still]

    def second(transport: Transport) -> list[float]:
        transport.post_recv(Edge(0, 1, 1), (1,), FLOAT).wait()
        mapping = transport._incoming[THERE]._mapping
        assert mapping is not None
        leases = [transport.post_recv(THERE, (2048,), FLOAT).lease() for _ in range(4)]
        tensors = [each.__enter__() for each in leases]
        for each in tensors:
            assert mapping.address <= each.data_ptr() < mapping.address + mapping.nbytes
            assert each.data_ptr() % 4096 == 0
        leases[1].__exit__(None, None, None)  # Not the oldest: no credit yet.
        signal_ready(transport)
        transport.post_recv(Edge(0, 1, 1), (1,), FLOAT).wait()
        values = [each[-1].item() for each in tensors]
        for index in (3, 0, 2):
            leases[index].__exit__(None, None, None)
        refused = raises(MtMegatronError, leases[0].__enter__)
        assert "after it was given back" in refused
        with transport.post_recv(THERE, (2048,), FLOAT).lease() as got:
            values.append(got[-1].item())
        return values

    out, values = run_pair(first, second, [THERE, BACK, Edge(0, 1, 1)], helper=helper)
    assert out == [False, False] and values == [0.0, 1.0, 2.0, 3.0, 4.0]


def help_leaves_leases_in_place(helper: str) -> None:
    """The sender's wait for a message at the ring's end is over though nobody waits here, and the message is
    in place all the same: only a message that others stand behind is copied."""
    whole = RING // FLOAT.itemsize
    signal = Edge(0, 1, 1)

    def first(transport: Transport) -> None:
        for value in range(2):
            transport.post_send(THERE, torch.full((1500,), 1.0)).wait(10.0)
            transport.post_send(THERE, torch.full((whole,), 2.0 + value)).wait(10.0)
            transport.post_send(signal, torch.ones(1))
        transport.finish()

    def second(transport: Transport) -> list[Any]:
        found: list[Any] = []
        for says_shape in (True, False):
            transport.post_recv(THERE, (1500,), FLOAT).wait(10.0)
            receive = transport.post_recv(THERE, (whole,) if says_shape else None, FLOAT)
            transport.post_recv(signal, (1,), FLOAT).wait(10.0)
            lease = receive.lease(10.0)
            with lease as got:
                found.append([isinstance(lease, Owned), *got[[0, -1]].tolist()])
        return found

    found = run_pair(first, second, [THERE, signal], helper=helper)[1]
    assert found == [[False, 2.0, 2.0], [False, 3.0, 3.0]], found


def leases_of_what_does_not_fit(helper: str) -> None:
    """Slots before the ring's end are passed over; a larger message than the ring is copied."""
    sizes = [1500, 7000, 1500, 8192, 3000, 20_000, 0, 5000, 1000]

    def first(transport: Transport) -> None:
        for _ in range(5):
            for size in sizes:
                transport.post_send(THERE, torch.full((size,), float(size)))
        transport.finish()

    def second(transport: Transport) -> list[list[Any]]:
        """Size, whether it is copied, shape, the first element that is wrong, and how many are."""
        found = []
        for _ in range(5):
            for size in sizes:
                lease = transport.post_recv(THERE, (size,), FLOAT).lease()
                with lease as got:
                    wrong = (got != size).nonzero().flatten().tolist()
                    found.append([size, isinstance(lease, Owned), list(got.shape), wrong[:1], len(wrong)])
        return found

    expected = [[size, size in (20_000, 0, 1000), [size], [], 0] for size in sizes] * 5
    found = run_pair(first, second, helper=helper)[1]
    assert found == expected, [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
