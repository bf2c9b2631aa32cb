"""Begin and end of the RDMA transport over a fake of the verbs: connecting, forks, the process's end."""

from __future__ import annotations

import time

import pytest
import torch

from mt_megatron.comm.rdma import engine
from mt_megatron.comm.transport import Edge
from tests.comm.rdma.test_rdma_links import Pair

SECOND = Edge(1, 2, 0)


def test_a_late_rank_does_not_end_links_between_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for rank 0 before it connects to rank 2, whose own queue pair is ready by then."""
    monkeypatch.setattr(engine, "PROBE_SECONDS", 0.01)
    ranks, edges = Pair(count=3), (Edge(0, 1, 0), SECOND)
    ends = [ranks.begin_prepare(rank, *edges) for rank in (1, 2)]
    while "ready/2/1" not in ranks.keys:
        time.sleep(0.001)
    time.sleep(0.1)
    assert "ready/1/2" not in ranks.keys
    ends.append(ranks.begin_prepare(0, *edges))
    assert [end() for end in ends] == [None, None, None]
    for edge in edges:
        ranks.ranks[edge.source].post_send(edge, torch.tensor([7.0]))
        assert ranks.ranks[edge.target].post_recv(edge, (1,), torch.float32).wait().item() == 7.0
    ranks.close()
