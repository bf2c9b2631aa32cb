"""Connections and their ends over shared memory, one function each; run by ``ranks.several``."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from mt_megatron.comm.bootstrap import StoreBootstrap
from mt_megatron.comm.errors import PeerLost, TransferTimeout, TransportError, TransportUnavailable
from mt_megatron.comm.shared_memory import memory
from mt_megatron.comm.shared_memory.ring import RingSize
from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport as Transport
from mt_megatron.comm.transport import Edge
from mt_megatron.errors import MtMegatronError
from tests.comm.pairs import (
    BACK,
    FLOAT,
    RING,
    THERE,
    Child,
    await_ready,
    connected,
    raises,
    run_pair,
    signal_ready,
)


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


def sizes_must_agree(helper: str) -> str:
    """A rank with another ring is refused, before anything is sent."""

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

    found = {}
    for end, said in (("killed", "its process ended before it connected"), ("abandon", "it gave up")):
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")

            def leave(end: str = end, store: str = store) -> None:
                bootstrap = StoreBootstrap(dist.FileStore(store, 2), 0, "pair")
                transport = Transport(bootstrap, helper=helper)
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
