"""Order, credits and edges of two ranks over shared memory, one function each; run by ``ranks.several``."""

from __future__ import annotations

import time

import torch

from mt_megatron.comm.errors import TransferTimeout
from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport as Transport
from mt_megatron.comm.transport import Edge
from tests.comm.pairs import BACK, FLOAT, RING, THERE, await_ready, raises, run_pair, signal_ready


def posting_waits_for_nobody(helper: str) -> None:
    """64 MiB are posted while the peer takes nothing, as the word of it comes later: a post that waited would
    wait for ever. Their storage is exchanged at once."""
    count = 1 << 24

    def first(transport: Transport) -> None:
        await_ready(transport)
        tensors = [torch.arange(count, dtype=FLOAT), torch.full((3,), 7.0)]
        handles = [transport.post_send(THERE, each) for each in tensors]
        assert not any(each.test() for each in handles)
        for each in tensors:  # As upstream's deallocate_output_tensor.
            each.data = torch.empty((1,), dtype=each.dtype)
        signal_ready_again(transport)
        for handle in handles:
            handle.wait()
        assert all(each.test() for each in handles)

    def signal_ready_again(transport: Transport) -> None:
        transport.post_send(Edge(0, 1, 1), torch.ones(1))

    def second(transport: Transport) -> None:
        signal_ready(transport)
        transport.post_recv(Edge(0, 1, 1), (1,), FLOAT).wait()
        got = transport.post_recv(THERE, (count,), FLOAT).wait()
        assert torch.equal(got, torch.arange(count, dtype=FLOAT))
        assert transport.post_recv(THERE, (3,), FLOAT).wait().tolist() == [7.0] * 3

    run_pair(first, second, [THERE, BACK, Edge(0, 1, 1)], helper=helper)


def eight_messages_are_in_flight(helper: str) -> None:
    """They are out before the peer asks for the first; the ninth is not."""

    def first(transport: Transport) -> list[bool]:
        handles = [transport.post_send(THERE, torch.full((1000,), float(each))) for each in range(9)]
        out = [each.test() for each in handles]
        transport.post_send(Edge(0, 1, 1), torch.ones(1))
        transport.finish()
        return out

    def second(transport: Transport) -> list[float]:
        transport.post_recv(Edge(0, 1, 1), (1,), FLOAT).wait()
        return [transport.post_recv(THERE, (1000,), FLOAT).wait()[-1].item() for _ in range(9)]

    out, values = run_pair(first, second, [THERE, Edge(0, 1, 1)], helper=helper)
    assert out == [True] * 8 + [False] and values == [float(each) for each in range(9)]


def edges_do_not_wait_for_each_other(helper: str) -> None:
    """A full edge holds back no other; messages of an edge are taken in any order of waits."""
    lanes = [Edge(0, 1, lane) for lane in range(3)]

    def first(transport: Transport) -> None:
        transport.post_send(lanes[0], torch.ones(4 * RING))
        for lane in lanes[1:]:
            for value in range(3):
                transport.post_send(lane, torch.full((2,), float(10 * lane.lane + value)))
        transport.finish()

    def second(transport: Transport) -> list[float]:
        big = transport.post_recv(lanes[0], (4 * RING,), FLOAT)
        small = {
            (lane.lane, value): transport.post_recv(lane, (2,), FLOAT)
            for lane in lanes[1:]
            for value in range(3)
        }
        order = [(2, 2), (1, 1), (2, 0), (1, 2), (1, 0), (2, 1)]
        found = [small[each].wait()[0].item() for each in order]
        assert bool((big.wait() == 1).all())
        return found

    _, found = run_pair(first, second, lanes, helper=helper)
    assert found == [22.0, 11.0, 20.0, 12.0, 10.0, 21.0]


def a_send_ends_though_nobody_waits(helper: str) -> None:
    """Both sides post and wait for their sends first: posted receives take the messages meanwhile."""
    count = 3 * RING

    def role(transport: Transport) -> float:
        there, back = (THERE, BACK) if transport._own == 0 else (BACK, THERE)
        receives = [transport.post_recv(back, (count,), FLOAT) for _ in range(2)]
        sends = [transport.post_send(there, torch.full((count,), float(each))) for each in range(2)]
        for each in sends:
            each.wait(10.0)
        # Of unknown size:
        unknown = transport.post_recv(back, None, FLOAT)
        transport.post_send(there, torch.full((count,), 5.0), with_shape=True).wait(10.0)
        return sum(each.wait()[-1].item() for each in [*receives, unknown])

    assert run_pair(role, role, helper=helper) == [6.0, 6.0]


def slots_passed_over_count(helper: str) -> None:
    """A message as large as the ring, from its second slot on, needs the slots before it too: the receive
    that is posted takes it though nobody waits there."""
    whole = RING // FLOAT.itemsize

    def role(transport: Transport) -> float:
        there, back = (THERE, BACK) if transport._own == 0 else (BACK, THERE)
        first = transport.post_recv(back, (1,), FLOAT)
        transport.post_send(there, torch.ones(1)).wait(10.0)
        first.wait(10.0)
        receive = transport.post_recv(back, (whole,), FLOAT)
        transport.post_send(there, torch.full((whole,), 2.0)).wait(10.0)
        return receive.wait(10.0)[-1].item()

    assert run_pair(role, role, helper=helper) == [2.0, 2.0]


def more_edges_later(helper: str) -> int:
    """``prepare`` again: edges that exist stay, new ones come."""

    def role(transport: Transport) -> int:
        own = transport._own
        for lane in range(1, 5):
            transport.prepare([THERE, BACK, Edge(0, 1, lane), Edge(1, 0, lane)])
            transport.post_send(Edge(own, 1 - own, lane), torch.full((1,), float(lane)))
            assert transport.post_recv(Edge(1 - own, own, lane), (1,), FLOAT).wait().item() == lane
        return len(transport._outgoing)

    found = run_pair(role, role, helper=helper)
    assert found == [5, 5]
    return int(found[0])


def waits_have_limits(helper: str) -> dict[str, str]:
    """A silent peer: each wait ends with its own time-out, and can be tried again."""

    def first(transport: Transport) -> dict[str, str]:
        said: dict[str, str] = {}
        began = time.monotonic()
        receiving = transport.post_recv(BACK, (4,), FLOAT)
        said["receive"] = raises(TransferTimeout, lambda: receiving.wait(0.15))
        said["lease"] = raises(TransferTimeout, lambda: receiving.lease(0.1))
        sending = transport.post_send(THERE, torch.ones(3 * RING))
        said["send"] = raises(TransferTimeout, lambda: sending.wait(0.15))
        assert 0.4 <= time.monotonic() - began < 5
        transport.post_send(Edge(0, 1, 1), torch.ones(1))
        assert receiving.wait().tolist() == [1.0] * 4
        sending.wait()
        return said

    def second(transport: Transport) -> None:
        transport.post_recv(Edge(0, 1, 1), (1,), FLOAT).wait()
        transport.post_send(BACK, torch.ones(4))
        assert bool(transport.post_recv(THERE, (3 * RING,), FLOAT).wait().all())
        transport.finish()

    found: dict[str, str] = run_pair(first, second, [THERE, BACK, Edge(0, 1, 1)], helper=helper)[0]
    return found
