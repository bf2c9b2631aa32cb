"""Begin and end of the RDMA transport over a fake of the verbs: connecting, forks, the process's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from mt_megatron.comm import stage_exchange
from mt_megatron.comm.bootstrap import own_place
from mt_megatron.comm.errors import TransferTimeout, TransportError, TransportUnavailable
from mt_megatron.comm.rdma import engine, verbs
from mt_megatron.comm.rdma import transport as rdma_transport
from mt_megatron.comm.rdma.ports import Port
from mt_megatron.comm.transport import UNLABELLED, Edge
from mt_megatron.seams import transport as seam
from tests.comm.rdma.fake_ranks import BACK, FORTH, Pair

SECOND = Edge(1, 2, 0)


def test_a_late_rank_does_not_end_links_between_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for rank 0 before it connects to rank 2, whose own queue pair is ready by then."""
    monkeypatch.setattr(engine, "PROBE_SECONDS", 0.01)
    ranks, edges = Pair(count=3), (Edge(0, 1, 0), SECOND)
    ends = [ranks.begin_prepare(rank, *edges) for rank in (1, 2)]
    deadline = time.monotonic() + 20.0
    while "ready/2/1" not in ranks.keys:
        assert time.monotonic() < deadline, [end() for end in ends]
        time.sleep(0.001)
    time.sleep(0.1)
    assert "ready/1/2" not in ranks.keys
    ends.append(ranks.begin_prepare(0, *edges))
    assert [end() for end in ends] == [None, None, None]
    for edge in edges:
        ranks.ranks[edge.source].post_send(edge, torch.tensor([7.0]))
        assert ranks.ranks[edge.target].post_recv(edge, (1,), torch.float32).wait().item() == 7.0
    ranks.close()


@pytest.mark.parametrize(("is_near", "said"), [(True, "its process ended"), (False, "'never' of rank 1")])
def test_a_peer_that_is_killed_while_it_connects_is_named(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_near: bool, said: str
) -> None:
    """It says nothing, and is not probed before it is ready. On another machine the number of its process
    says nothing either."""
    monkeypatch.setattr(rdma_transport, "_LOOK_SECONDS", 0.01)
    child = subprocess.Popen(["sleep", "60"])
    place = replace(own_place(1), pid=child.pid)
    pair.ranks[0]._links[1].place = place if is_near else replace(place, boot="another")

    def wait() -> None:
        pair.ranks[0]._fetch("never", 1, time.monotonic() + 0.05)

    with pytest.raises(TransferTimeout):
        wait()
    child.kill()
    # The process is kept as a zombie, as by a launcher that waits for another one.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(TransportError, match=said):
        wait()
    child.wait()


def test_a_network_that_carries_nothing_is_noticed_by_prepare() -> None:
    """Each rank falls back, where it may: queue pairs become ready without a packet."""
    pair = Pair()
    pair.network.is_cut = True
    for error, other in zip(pair.prepare(FORTH, BACK), (1, 0), strict=True):
        assert isinstance(error, TransportUnavailable)
        assert f"the first write over fake0 port 1 to rank {other} failed: " in error.reason
        assert "RETRY_EXC_ERR" in error.reason and "UDP port 4791" in error.change
    pair.close()


def test_a_write_that_hangs_is_unavailable_after_the_deadline(pair: Pair) -> None:
    sender = pair.queue_pair(0)
    sender.held = deque()
    pair.ranks[0].post_send(FORTH, torch.zeros(1))
    with pytest.raises(TransportUnavailable, match="to rank 1 failed: it is not acknowledged"):
        pair.ranks[0]._require_acknowledged(1, time.monotonic() + 0.01)
    sender.release()
    pair.ranks[0]._require_acknowledged(1, time.monotonic() + 20.0)


def test_a_peer_that_closes_at_once_had_a_link() -> None:
    """Its farewell, and messages before it, are all that the other rank needs."""
    pair = Pair()
    end = pair.begin_prepare(0, BACK)
    assert pair.begin_prepare(1, BACK)() is None
    pair.ranks[1].post_send(BACK, torch.tensor([3.0]))
    pair.ranks[1].close()
    assert end() is None
    assert pair.ranks[0].post_recv(BACK, (1,), torch.float32).wait().item() == 3.0
    pair.close()


def test_gids_of_different_types_are_refused() -> None:
    pair = Pair()
    pair.devices[1].gid_type = "RoCE v1"
    first, second = pair.prepare(FORTH)
    for error in (first, second):
        assert isinstance(error, TransportUnavailable) and "GIDs of one type" in error.change
    assert "rank 1 speaks version 2 over Ethernet (RoCE v1), rank 0 version 2 over Ethernet (RoCE v2)" in str(
        first
    )
    pair.close()


def test_a_queue_pair_names_the_type_of_its_gid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever pyverbs answers: the port's GID was chosen from sysfs."""
    pyverbs = MagicMock()
    for name in ("pyverbs", "pyverbs.cq", "pyverbs.qp", "pyverbs.wr"):
        monkeypatch.setitem(sys.modules, name, pyverbs)
    events = os.eventfd(0)
    monkeypatch.setattr(verbs, "_with_event_file", lambda make: (make(), events))
    port = Port("mlx5_0", 1, 3, "fe80::1", "Ethernet", "RoCE v1")
    found = verbs._QueuePair(MagicMock(), MagicMock(), port, MagicMock(), 8, 8)
    os.close(events)
    assert (found.address["link"], found.address["gid_type"]) == ("Ethernet", "RoCE v1")


def test_the_end_of_the_process_waits_until_messages_are_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an exchange that was used outside a step, and more messages than a ring has slots."""
    monkeypatch.setattr(stage_exchange, "_neighbours", list)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    # The receiver lives on, as in a process of its own.
    rdma_transport._open.discard(pair.ranks[1])
    exchange = stage_exchange.StageExchange(pair.ranks[0], torch.device("cpu"))
    for number in range(6):
        exchange._send(FORTH, torch.full((256,), float(number)), with_shape=False, label=UNLABELLED)
    received: list[float] = []

    def receive() -> None:
        time.sleep(0.05)
        for _ in range(6):
            received.append(pair.ranks[1].post_recv(FORTH, (256,), torch.float32).wait()[0].item())

    thread = threading.Thread(target=receive)
    thread.start()
    seam.install(exchange)
    rdma_transport._at_exit()
    thread.join()
    assert received == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert pair.devices[0].closed


def test_a_forked_child_ends_whatever_the_parent_was_doing(pair: Pair) -> None:
    """``prepare``, which holds the lock, may wait for minutes. The parent's channels work on."""
    with pair.ranks[0]._preparing:
        child = os.fork()
        if not child:
            signal.alarm(5)
            try:
                rdma_transport._at_exit()
                pair.ranks[0].close()
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    pair.ranks[0].post_send(FORTH, torch.tensor([4.0]))
    assert pair.ranks[1].post_recv(FORTH, (1,), torch.float32).wait().item() == 4.0
