"""Pipeline transfers over Gloo: neither a freed tensor nor a dropped handle loses what was sent."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.patches.device import pending_transfers
from tests.launch import run_ranks

COUNT = 200_000


def exchange() -> Any:
    """Rank 0 sends twice and lets go of everything at once; rank 1 receives a second later."""
    import torch
    import torch.distributed as dist

    import mt_megatron
    from mt_megatron.parallel.rank_layout import RankLayout, destroy, initialize

    mt_megatron.patch("cpu")
    initialize(RankLayout(world_size=2, pp=2), mt_megatron.backend())
    from megatron.core.pipeline_parallel.p2p_communication import _communicate

    config = SimpleNamespace(
        variable_seq_lengths=False,
        pipeline_dtype=torch.float32,
        use_ring_exchange_p2p=False,
        batch_p2p_comm=False,
        batch_p2p_sync=False,
        timers=None,
    )

    def communicate(send: Any, receive: bool) -> tuple[Any, Any]:
        received, _, handles = _communicate(
            tensor_send_next=send,
            tensor_send_prev=None,
            recv_prev=receive,
            recv_next=False,
            tensor_shape=(COUNT,),
            config=config,
            wait_on_reqs=False,
        )
        return received, handles

    found: list[Any] = []
    sends = dist.get_rank() == 0
    if sends:
        for value in (1.0, 2.0):
            tensor = torch.full((COUNT,), value)
            communicate(tensor, False)  # the handles are dropped here
            tensor.data = torch.empty(1)
            gc.collect()
            # Whatever the allocator hands out again is written over.
            overwritten = [torch.full((COUNT,), -1.0) for _ in range(4)]
            del overwritten
        dist.barrier()
        found.append(len(pending_transfers._abandoned))
    else:
        time.sleep(1.0)
        for _ in range(2):
            received, handles = communicate(None, True)
            for handle in handles:
                handle.wait()
                handle.wait()  # a second wait must not wait for a second message
                assert handle.is_completed()
            found.append([received.min().item(), received.max().item()])
        dist.barrier()
    destroy()
    if sends:
        found.append(len(pending_transfers._abandoned))
    return found


@pytest.fixture(scope="module")
def exchanged() -> list[Any]:
    return run_ranks(2, "tests.patches.device.test_pending_transfers:exchange", timeout=60)


def test_a_send_survives_its_tensor_and_its_handle(exchanged: list[Any]) -> None:
    assert exchanged[1] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_send_without_a_handle_is_let_go_when_its_group_ends(exchanged: list[Any]) -> None:
    assert exchanged[0] == [1, 0]


def test_transfers_of_a_lost_peer_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[timedelta] = []

    class Lost:
        def wait(self, limit: timedelta) -> None:
            limits.append(limit)
            raise RuntimeError("Connection closed by peer")

    waiting = [Lost(), Lost()]
    monkeypatch.setattr(pending_transfers, "_abandoned", waiting)
    pending_transfers.end_transfers()
    assert not waiting and len(limits) == 1 and limits[0] < timedelta(minutes=1)
