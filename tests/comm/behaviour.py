"""What a pair of ranks over shared memory does, one function each; run by ``run_ranks``."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from mt_megatron.comm.errors import MessageMismatch, PeerLost, TransferTimeout, TransportError
from mt_megatron.comm.shared_memory.ring import RingSize
from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport as Transport
from mt_megatron.comm.transport import BACKWARD, FORWARD, Edge, Label, Owned
from mt_megatron.errors import MtMegatronError
from tests.comm.pairs import BACK, DTYPES, SMALL, THERE, as_bytes, run_pair

FLOAT = torch.float32
RING = SMALL.slots * SMALL.slot_bytes


def several(names: list[str], helper: str) -> dict[str, Any]:
    """What functions of this file return, or the text of their errors, by name."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = globals()[name](helper)
        except Exception as error:  # noqa: BLE001 - shown by the test of that name.
            found[name] = f"{type(error).__name__}: {error}"
    return found


def signal_ready(transport: Transport) -> None:
    """Let the peer's ``await_ready`` return."""
    transport.post_send(THERE if transport._own == 0 else BACK, torch.ones(1))


def await_ready(transport: Transport) -> None:
    transport.post_recv(BACK if transport._own == 0 else THERE, (1,), FLOAT).wait()


def raises(kind: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def posting_waits_for_nobody(helper: str) -> None:
    """64 MiB are posted while the peer does nothing; their storage is exchanged at once."""
    count = 1 << 24

    def first(transport: Transport) -> float:
        await_ready(transport)
        tensors = [torch.arange(count, dtype=FLOAT), torch.full((3,), 7.0)]
        began = time.monotonic()
        handles = [transport.post_send(THERE, each) for each in tensors]
        seconds = time.monotonic() - began
        assert not any(each.test() for each in handles)
        for each in tensors:  # As upstream's deallocate_output_tensor.
            each.data = torch.empty((1,), dtype=each.dtype)
        signal_ready_again(transport)
        for handle in handles:
            handle.wait()
        assert all(each.test() for each in handles)
        return seconds

    def signal_ready_again(transport: Transport) -> None:
        transport.post_send(Edge(0, 1, 1), torch.ones(1))

    def second(transport: Transport) -> None:
        signal_ready(transport)
        transport.post_recv(Edge(0, 1, 1), (1,), FLOAT).wait()
        got = transport.post_recv(THERE, (count,), FLOAT).wait()
        assert torch.equal(got, torch.arange(count, dtype=FLOAT))
        assert transport.post_recv(THERE, (3,), FLOAT).wait().tolist() == [7.0] * 3

    seconds, _ = run_pair(first, second, [THERE, BACK, Edge(0, 1, 1)], helper=helper)
    assert seconds < 1.0, seconds


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


def leases_of_what_does_not_fit(helper: str) -> None:
    """Slots before the ring's end are passed over; a larger message than the ring is copied."""
    sizes = [1500, 7000, 1500, 8192, 3000, 20_000, 0, 5000, 1000]

    def first(transport: Transport) -> None:
        for _ in range(5):
            for size in sizes:
                transport.post_send(THERE, torch.full((size,), float(size)))
        transport.finish()

    def second(transport: Transport) -> int:
        in_place = 0
        for _ in range(5):
            for size in sizes:
                lease = transport.post_recv(THERE, (size,), FLOAT).lease()
                in_place += not isinstance(lease, Owned)
                with lease as got:
                    assert got.shape == (size,) and bool((got == size).all())
        return in_place

    assert run_pair(first, second, helper=helper)[1] == 5 * 6


def written_before_it_was_copied(helper: str) -> None:
    """A write to a tensor that waits ends the edge; an exchanged ``.data``, and a write after it, do not."""

    def first(transport: Transport) -> str:
        whole = torch.arange(50_000.0)
        sending = transport.post_send(THERE, whole)
        whole.data = torch.empty(1)
        sending.wait()
        whole.data = torch.arange(50_000.0)
        whole.add_(1.0)
        transport.post_send(THERE, whole)
        whole.view(-1)[3:].mul_(2.0)
        return raises(TransportError, transport.finish)

    def second(transport: Transport) -> bool:
        kept = transport.post_recv(THERE, (50_000,), FLOAT).wait()
        time.sleep(0.5)
        with suppress(TransportError):
            transport.post_recv(THERE, (50_000,), FLOAT).wait()
        return bool((kept == torch.arange(50_000.0)).all())

    said, same = run_pair(first, second, helper=helper)
    assert same and "(50000,) was written to in place 1 time(s) between its post to rank 1" in said, said


def every_dtype_and_shape(helper: str) -> int:
    """Codes of all dtypes, with 0 to 8 dimensions, empty, transposed, expanded, conjugated; into ``out``."""
    shapes: list[tuple[int, ...]] = [(), (1,), (0,), (3, 0, 2), (2, 3), (1, 2, 1, 2, 1, 2, 1, 3)]
    tensors = []
    for dtype in DTYPES:
        for shape in shapes:
            count = int(torch.Size(shape).numel())
            raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
            raw = raw & 1 if dtype is torch.bool else raw
            tensors.append(raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype))
        bits = torch.arange(6 * dtype.itemsize).to(torch.uint8) & 1
        tensors.append(bits.view(dtype).view(2, 3).t())
        if dtype is torch.complex64:
            tensors.append(torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj())
            tensors.append(torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj().imag)
    tensors += [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(20)[::3],
        torch.ones(1).expand(5, 4),
        torch.ones(3, requires_grad=True) * 2,
        torch.arange(10_000, dtype=torch.int16).view(100, 100)[:, ::2],
    ]

    def first(transport: Transport) -> None:
        for each in tensors:
            transport.post_send(THERE, each)
        transport.finish()

    def second(transport: Transport) -> int:
        for index, each in enumerate(tensors):
            out = torch.empty(each.shape, dtype=each.dtype) if index % 2 else None
            got = transport.post_recv(THERE, each.shape, each.dtype, out=out).wait()
            assert out is None or got is out
            assert got.shape == each.shape and got.dtype == each.dtype and not got.requires_grad
            assert torch.equal(as_bytes(got), as_bytes(each.detach().resolve_neg())), (index, each)
        return len(tensors)

    return int(run_pair(first, second, helper=helper)[1])


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


def wrong_messages_are_refused(helper: str) -> dict[str, str]:
    """Another shape, dtype or label than asked for; damaged bytes; what no transport sends."""
    lanes = {name: Edge(0, 1, lane) for lane, name in enumerate(("shape", "dtype", "label", "crc", "header"))}
    asked = Label(3, 0, FORWARD)

    def first(transport: Transport) -> list[str]:
        transport.post_send(lanes["shape"], torch.ones(2, 3))
        transport.post_send(lanes["dtype"], torch.ones(2, dtype=torch.bfloat16))
        transport.post_send(lanes["label"], torch.ones(2), label=Label(3, 0, BACKWARD))
        for name in ("crc", "header"):
            transport.post_send(lanes[name], torch.ones(2))
        transport.finish()
        sparse = torch.ones(2, 2).to_sparse()
        said = [raises(MtMegatronError, lambda: transport.post_send(lanes["shape"], sparse))]
        nine = torch.ones([1] * 9)
        said.append(raises(MtMegatronError, lambda: transport.post_send(lanes["shape"], nine)))
        said.append(raises(MtMegatronError, lambda: transport.post_send(Edge(0, 1, 77), nine)))
        # Refused messages leave the edge as it was.
        transport.post_send(Edge(0, 1, 6), torch.ones(1))
        return said

    def second(transport: Transport) -> dict[str, str]:
        ready = Edge(0, 1, 6)
        transport.post_recv(ready, (1,), FLOAT).wait()
        for name, offset in (("crc", SMALL.payload_offset), ("header", 4096 + 16)):
            mapping = transport._incoming[lanes[name]]._mapping
            assert mapping is not None
            ctypes.c_uint8.from_address(mapping.address + offset).value ^= 1
        handles = {
            "shape": transport.post_recv(lanes["shape"], (3, 2), FLOAT),
            "dtype": transport.post_recv(lanes["dtype"], (2,), torch.float16),
            "label": transport.post_recv(lanes["label"], (2,), FLOAT, label=asked),
            "crc": transport.post_recv(lanes["crc"], (2,), FLOAT),
            "header": transport.post_recv(lanes["header"], (2,), FLOAT),
        }
        found = {name: raises(MessageMismatch, handle.wait) for name, handle in handles.items()}
        for name, handle in handles.items():
            assert raises(MessageMismatch, handle.wait) == found[name]
        found["out"] = raises(
            MtMegatronError, lambda: transport.post_recv(ready, (2,), FLOAT, out=torch.ones(3))
        )
        return found

    edges = [THERE, BACK, *lanes.values(), Edge(0, 1, 6)]

    # The second damages what lies in its rings already.
    said, found = run_pair(first, second, edges, helper=helper, crc=True)
    assert "layout torch.sparse_coo" in said[0] and "9 dimensions" in said[1] and "not prepared" in said[2]
    return dict(found)


def labels_arrive(helper: str) -> list[int]:
    def first(transport: Transport) -> None:
        transport.post_send(THERE, torch.ones(1), label=Label(5, 1, BACKWARD))
        transport.finish()

    def second(transport: Transport) -> list[int]:
        handle = transport.post_recv(THERE, (1,), FLOAT, label=Label(micro_batch=5))
        assert handle.label == Label()
        handle.wait()
        assert "taken twice" in raises(MtMegatronError, handle.wait)
        return list(handle.label)

    return list(run_pair(first, second, helper=helper)[1])


def ends_are_clean(helper: str) -> dict[str, str]:
    """A closed peer's messages are still delivered, then its end is named; no thread is left."""

    def first(transport: Transport) -> dict[str, str]:
        for value in range(3):
            transport.post_send(THERE, torch.full((5,), float(value)))
        transport.post_send(THERE, torch.ones(3 * RING)).wait()
        transport.finish()
        transport.close()
        transport.close()
        assert not [each for each in threading.enumerate() if each.name.startswith("p2p-")]
        return {"closed": raises(TransportError, lambda: transport.post_send(THERE, torch.ones(1)))}

    def second(transport: Transport) -> dict[str, str]:
        got = [transport.post_recv(THERE, (5,), FLOAT).wait()[0].item() for _ in range(2)]
        last = transport.post_recv(THERE, (5,), FLOAT)
        big = transport.post_recv(THERE, (3 * RING,), FLOAT)
        assert "2 transfer(s)" in raises(MtMegatronError, transport.finish)
        assert bool(big.wait().all())
        got.append(last.wait()[0].item())
        assert got == [0.0, 1.0, 2.0]
        missing = transport.post_recv(THERE, (5,), FLOAT)
        found = {"peer": raises(PeerLost, missing.wait)}
        assert raises(PeerLost, lambda: transport.post_recv(THERE, (5,), FLOAT)) == found["peer"]
        transport.abandon()
        found["abandoned"] = raises(TransportError, transport.finish)
        return found

    one, other = run_pair(first, second, helper=helper)
    return {**one, **other}


def an_abandoned_peer_says_so(helper: str) -> str:
    def first(transport: Transport) -> None:
        await_ready(transport)
        transport.abandon()

    def second(transport: Transport) -> str:
        signal_ready(transport)
        return raises(PeerLost, transport.post_recv(THERE, (5,), FLOAT).wait)

    return str(run_pair(first, second, helper=helper)[1])


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


def sizes_must_agree(helper: str) -> str:
    """A rank with another ring is refused, before anything is sent."""
    import tempfile
    from pathlib import Path

    from mt_megatron.comm.errors import TransportUnavailable
    from tests.comm.pairs import Child, connected

    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")

        def end(rank: int) -> str:
            size = RingSize(4096, 8 + rank)
            return raises(
                TransportUnavailable, lambda: connected(store, rank, [THERE, BACK], size=size, helper=helper)
            )

        children = [Child(lambda rank=rank: end(rank)) for rank in range(2)]
        return str([each.result() for each in children][0])


def a_rank_without_memory_is_refused_by_both(helper: str) -> list[str]:
    """One rank cannot make, or cannot map, a ring: both get the reason at once; later edges work."""
    from unittest import mock

    from mt_megatron.comm.errors import TransportUnavailable
    from mt_megatron.comm.shared_memory import memory

    def refuse(*unused: object) -> int:
        raise TransportUnavailable("shm", "no memory today", "wait")

    def role(transport: Transport) -> list[str]:
        own, said = transport._own, []
        edges = [Edge(0, 1, 8), Edge(1, 0, 8)]
        for name in ("create", "check"):
            with mock.patch.object(memory, name, refuse if own == 0 else getattr(memory, name)):
                said.append(raises(TransportUnavailable, lambda: transport.prepare(edges)))
            assert edges[own] not in transport._outgoing and len(transport._incoming) == 1
        transport.prepare(edges)
        transport.post_send(edges[own], torch.ones(1))
        assert transport.post_recv(edges[1 - own], (1,), FLOAT).wait().item() == 1
        return said

    return [each for found in run_pair(role, role, helper=helper) for each in found]


def a_rank_that_never_connects_is_named(helper: str) -> dict[str, float]:
    """Killed, or given up, before it connects: who waits for it learns of it within 2 s."""
    import os
    import signal
    import tempfile
    import time
    from pathlib import Path

    import torch.distributed as dist

    from mt_megatron.comm.bootstrap import StoreBootstrap
    from mt_megatron.comm.errors import PeerLost
    from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport
    from tests.comm.pairs import Child, connected

    found = {}
    for end, said in (("killed", "its process ended before it connected"), ("abandon", "it gave up")):
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")

            def leave(end: str = end, store: str = store) -> None:
                bootstrap = StoreBootstrap(dist.FileStore(store, 2), 0, "pair")
                transport = SharedMemoryTransport(bootstrap, helper=helper)
                time.sleep(0.3)  # The other rank waits by now.
                if end == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                transport.abandon()
                time.sleep(2.5)  # Its end is not what is noticed.

            def wait(store: str = store, said: str = said) -> float:
                began = time.monotonic()
                error = raises(PeerLost, lambda: connected(store, 1, [THERE, BACK], helper=helper))
                assert "rank 0 (process" in error and said in error, error
                return time.monotonic() - began

            leaving, waiting = Child(leave), Child(wait)
            found[end] = waiting.result()
            leaving.reap()
    return found


def strangers_are_ignored(helper: str) -> list[str]:
    """Connections that say nothing, something else or another name, before the peer's own; and an address at
    which nobody listens any more."""
    import json
    import socket
    import tempfile
    from pathlib import Path

    import torch.distributed as dist

    from mt_megatron.comm.bootstrap import StoreBootstrap
    from tests.comm.pairs import Child, connected

    def knock(address: str, said: bytes) -> socket.socket:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(f"\0{address}")
        if said:
            stranger.send(said)
        else:
            stranger.close()
        return stranger

    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")

        def end(rank: int) -> float:
            strangers = []
            if rank == 0:
                other = StoreBootstrap(dist.FileStore(store, 2), 0, "pair")
                address = other.fetch("socket/1", 10).decode()
                wrong = {"rank": 0, "name": "another"}
                strangers = [
                    knock(address, each) for each in (b"", b"hello", b"[]", json.dumps(wrong).encode())
                ]
            transport = connected(store, rank, [THERE, BACK], helper=helper)
            transport.post_send(THERE if rank == 0 else BACK, torch.ones(1))
            got = transport.post_recv(BACK if rank == 0 else THERE, (1,), FLOAT).wait().item()
            transport.finish()
            transport.close()
            del strangers
            return float(got)

        children = [Child(lambda rank=rank: end(rank)) for rank in range(2)]
        assert [each.result() for each in children] == [1.0, 1.0]

    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")

        def gone(rank: int) -> str:
            bootstrap = StoreBootstrap(dist.FileStore(store, 2), rank, "pair")
            if rank == 1:
                Transport(bootstrap, helper=helper).close()
                bootstrap.publish("gone", b"1")
                return ""
            bootstrap.fetch("gone", 10)
            return raises(PeerLost, lambda: Transport(bootstrap, helper=helper).prepare([THERE]))

        children = [Child(lambda rank=rank: gone(rank)) for rank in range(2)]
        found = [str(each.result()) for each in children]

    with tempfile.TemporaryDirectory() as folder:
        alone = StoreBootstrap(dist.FileStore(str(Path(folder) / "store"), 2), 0, "pair")
        transport = Transport(alone, helper=helper, timeout=0.1)
        found.append(raises(TransferTimeout, lambda: transport.prepare([THERE])))
        transport.close()
    return found
