"""Transport over torch's collectives, where the library connects a group in its first transfer, as NCCL."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from mt_megatron.comm import collective
from mt_megatron.comm.transport import BACKWARD, FORWARD, Edge
from mt_megatron.pipeline.actions import Action, Kind, Schedule, matching_send, transfers_in
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.lowering import lowered
from tests.launch import run_ranks

WAITS_FOR_EVER = 20.0
"""Seconds."""


class Group:
    """Of two ranks and one direction; the first transfer of each meets that of the other."""

    def __init__(self, members: list[int]) -> None:
        self.members = members
        self.messages: queue.Queue[Tensor] = queue.Queue()
        self._meeting = threading.Barrier(2)
        self._connected = threading.local()

    def connect(self) -> None:
        if not hasattr(self._connected, "yes"):
            self._meeting.wait(WAITS_FOR_EVER)
            self._connected.yes = True

    def _get_backend(self, device: torch.device) -> None:
        return None


class Work:
    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish = finish

    def wait(self, timeout: Any = None) -> None:
        self._finish()

    def is_completed(self) -> bool:
        return False


class LazyDist:
    """``torch.distributed`` of a job whose ranks are threads."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._own = threading.local()
        self._groups: dict[str, Group] = {}
        self._given: dict[int, Any] = {}
        self._all = threading.Barrier(ranks)
        self._lock = threading.Lock()
        # Compared by identity.
        self.isend, self.irecv = self._isend, self._irecv

    def begin(self, rank: int) -> None:
        self._own.rank = rank

    def get_rank(self) -> int:
        rank: int = self._own.rank
        return rank

    def get_world_size(self) -> int:
        return self._ranks

    def get_backend(self, group: Any = None) -> str:
        return "nccl"

    def get_process_group_ranks(self, group: Any) -> list[int]:
        return list(range(self._ranks))

    def all_gather_object(self, every: list[Any], own: Any, group: Any) -> None:
        self._given[self.get_rank()] = own
        self._all.wait(WAITS_FOR_EVER)
        every[:] = [self._given[rank] for rank in range(self._ranks)]
        self._all.wait(WAITS_FOR_EVER)

    def new_group(self, members: list[int], *, use_local_synchronization: bool, **options: Any) -> Group:
        """As torch's: of the two alone, who meet if they have the same name for it."""
        assert use_local_synchronization and self.get_rank() in members
        name = distributed_c10d._process_group_name(members, True)
        with self._lock:
            found = self._groups.setdefault(name, Group(members))
        assert found.members == members
        return found

    def _isend(self, tensor: Tensor, peer: int, group: Group) -> Work:
        group.connect()
        group.messages.put(tensor.clone())
        return Work(lambda: None)

    def _irecv(self, tensor: Tensor, peer: int, group: Group) -> Work:
        group.connect()
        return Work(lambda: tensor.copy_(group.messages.get(timeout=WAITS_FOR_EVER)))


def edge_of(schedule: Schedule, sent: Action) -> Edge:
    forward = sent.kind is Kind.SEND_F
    target = sent.stage + (1 if forward else -1)
    rank = schedule.placement.rank
    return Edge(rank(sent.stage), rank(target), FORWARD if forward else BACKWARD)


def run_transfers(schedule: Schedule, rank: int) -> list[tuple[Action, int]]:
    """Computations and the micro-batch that each received."""
    transport = collective.CollectiveTransport(Group([0]), torch.device("cpu"))
    of = {
        action: edge_of(schedule, action if action.kind.name.startswith("SEND") else matching_send(action))
        for action in schedule.ranks[rank]
        if action.kind in (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)
    }
    transport.prepare(of.values())
    receiving, found = {}, []
    for action in schedule.ranks[rank]:
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            transport.post_send(of[action], torch.full((1,), float(action.microbatch)))
        elif action in of:
            receiving[action] = transport.post_recv(of[action], (1,), torch.float32)
        elif (awaited := transfers_in(schedule.placement, action)) is not None:
            found.append((action, int(receiving.pop(awaited).wait())))
    transport.finish()
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "chunks"), [("breadth_first", 2, 1), ("zb_h1", 3, 1), ("breadth_first", 3, 2)]
)
def test_ranks_do_not_wait_for_each_others_first_transfers(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, chunks: int
) -> None:
    schedule = lowered(generate(name, ranks=ranks, chunks=chunks, microbatches=2 * ranks))
    dist = LazyDist(ranks)
    monkeypatch.setattr(collective, "dist", dist)
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        dist.begin(rank)
        try:
            found[rank] = run_transfers(schedule, rank)
        except (threading.BrokenBarrierError, queue.Empty) as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(ranks):
        assert isinstance(found[rank], list), f"rank {rank} waits for ever"
        assert found[rank] and all(action.microbatch == number for action, number in found[rank])


def test_a_rank_without_new_edges_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over three ranks after a chain: its new edges are between the last rank and the first alone."""
    dist = LazyDist(3)
    monkeypatch.setattr(collective, "dist", dist)
    by_torch = distributed_c10d._process_group_name
    chain = {Edge(0, 1, FORWARD), Edge(1, 2, FORWARD)}
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        dist.begin(rank)
        try:
            transport = collective.CollectiveTransport(Group([0]), torch.device("cpu"))
            for edges in (chain, chain | {Edge(2, 0, FORWARD)}, chain):
                transport.prepare(each for each in edges if rank in each[:2])
            found[rank] = set(transport._groups)
        except threading.BrokenBarrierError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there = chain | {Edge(2, 0, FORWARD)}
    there |= {Edge(each.target, each.source, BACKWARD) for each in there}
    assert found == {rank: {each for each in there if rank in each[:2]} for rank in range(3)}
    assert distributed_c10d._process_group_name is by_torch


def groups_of_two() -> dict[str, Any]:
    """Messages over a chain of three real ranks that are in different numbers of groups."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    made: list[list[int]] = []
    by_torch = dist.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        made.append(ranks)
        return by_torch(ranks, **options)

    dist.new_group = new_group
    found = []
    for _ in range(2):
        # The second time as after the process groups were destroyed: nothing of the first may be met.
        transport = collective.CollectiveTransport(dist.group.WORLD, torch.device("cpu"), tagged=False)
        transport.prepare(Edge(each, each + 1, FORWARD) for each in (0, 1) if rank in (each, each + 1))
        if rank < 2:
            transport.post_send(Edge(rank, rank + 1, FORWARD), torch.full((2,), float(rank)))
        if rank > 0:
            found.append(
                transport.post_recv(Edge(rank - 1, rank, FORWARD), (2,), torch.float32).wait().tolist()
            )
        transport.finish()
        for group in transport._groups.values():
            dist.destroy_process_group(group)
    # Groups that all ranks make are named alike as before.
    total = torch.ones(1)
    dist.all_reduce(total, group=by_torch(list(range(3))))
    return {"made": made, "found": found, "total": total.item()}


@pytest.mark.parametrize("barrier", ["0", "1"])
def test_two_ranks_make_their_groups_alone(barrier: str) -> None:
    """``barrier``: torch's own after each group that is made."""
    found = run_ranks(
        3, "tests.comm.test_collective:groups_of_two", env={"TORCH_DIST_INIT_BARRIER": barrier}, timeout=90
    )
    assert [len(each["made"]) for each in found] == [4, 8, 4], "two a pair and time, of the pair alone"
    assert [each["found"] for each in found] == [[], [[0.0, 0.0]] * 2, [[1.0, 1.0]] * 2]
    assert [each["total"] for each in found] == [3.0] * 3


def test_a_message_that_one_thread_waits_for_may_be_tested_by_another() -> None:
    class Work:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            assert sending.test()  # the other thread comes between

    sending = collective._Sending([(Work(), torch.zeros(1)), (Work(), torch.zeros(1))])
    sending.wait()
    assert sending.test()


@pytest.mark.parametrize(
    ("named", "device", "library"),
    [
        ("gloo", "cpu", "gloo"),
        ("nccl", "cuda", "nccl"),
        ("cpu:gloo", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
    ],
)
def test_the_library_is_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, named: str, device: str, library: str
) -> None:
    monkeypatch.setattr(collective.dist, "get_backend", lambda group: named)
    assert collective.library_of(None, torch.device(device)) == library
