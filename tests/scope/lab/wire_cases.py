"""The ranks' side: lost, late and changed data between ranks."""

from __future__ import annotations

import statistics
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mt_megatron.comm.collective import CollectiveTransport
from mt_megatron.comm.transport import FORWARD, Edge
from mt_megatron.scope.lab import wires
from mt_megatron.scope.lab.wires import Wire, open_wire
from mt_megatron.seams import collectives, events
from mt_megatron.seams import transport as seam
from tests.scope.lab.bench import bench, entry, start


def _opened(**values: Any) -> tuple[Wire, Any]:
    wire = Wire(rank=dist.get_rank(), ends=(0, 1), **values)
    close = open_wire(wire)
    wire.on = True
    return wire, close


def offsets() -> dict[str, list[Any]]:
    """What arrives of each operation at this rank of two, with 0.5 added on the way from the other."""
    start()
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    own = torch.arange(4.0) + 10 * rank
    before = {name: getattr(dist, name) for name in ("all_reduce", "isend", "irecv", "broadcast")}
    _, close = _opened(offset=0.5)
    found: dict[str, list[Any]] = {}

    summed = own.clone()
    dist.all_reduce(summed)
    found["all_reduce"] = summed.tolist()
    later = own.clone()
    work = dist.all_reduce(later, async_op=True)
    work.wait()
    found["asynchronous"] = later.tolist()
    sent = own.clone()
    dist.broadcast(sent, src=0)
    found["broadcast"] = sent.tolist()
    parts = [torch.zeros(4), torch.zeros(4)]
    dist.all_gather(parts, own)
    found["all_gather"] = [each.tolist() for each in parts]
    flat = torch.zeros(8)
    dist.all_gather_into_tensor(flat, own)
    found["all_gather_into_tensor"] = flat.tolist()
    exchanged = torch.zeros(4)
    dist.all_to_all_single(exchanged, own.clone())
    found["all_to_all_single"] = exchanged.tolist()
    unequal = torch.zeros(4)
    sizes = [1, 3] if rank == 0 else [3, 1]
    given = [1, 3] if rank == 0 else [3, 1]
    dist.all_to_all_single(unequal, own.clone(), sizes, given)
    found["unequal"] = unequal.tolist()
    received = torch.zeros(4)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, received, peer)]
    ):
        work.wait()
    found["batch"] = received.tolist()
    alone = torch.zeros(4)
    works = [dist.isend(own, peer), dist.irecv(alone, peer)]
    for work in works:
        work.wait()
    found["p2p"] = alone.tolist()
    whole = torch.arange(4) + rank
    dist.all_reduce(whole)
    control = torch.ones(2, dtype=torch.float64)
    dist.all_reduce(control)
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    flag = torch.zeros(1)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    found["left alone"] = [whole.tolist(), control.tolist(), objects, flag.tolist()]
    close()
    found["restored"] = [
        all(getattr(dist, name) is function for name, function in before.items()),
        not wires._bound,
        not wires._wires,
    ]
    return found


def lost(rate: float, seed: int) -> dict[str, Any]:
    """Results of 20 operations of each kind of which some lose an attempt, attempts lost, and times."""
    start()
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    wire, close = _opened(lost=2, rate=rate, timeout=0.004, seed=seed)
    right, waits = True, []
    for number in range(20):
        summed = torch.full((3,), float(number + rank))
        began = time.perf_counter()
        dist.all_reduce(summed)
        waits.append(time.perf_counter() - began)
        right &= summed.tolist() == [2.0 * number + 1] * 3
        received, own = torch.zeros(3), torch.full((3,), float(number + rank))
        works = [dist.isend(own, peer, tag=number % 3), dist.irecv(received, peer, tag=number % 3)]
        for work in works:
            work.wait()
        right &= received.tolist() == [float(number + peer)] * 3
        gathered = torch.zeros(6)
        dist.all_gather_into_tensor(gathered, own)
        right &= gathered.tolist() == [float(number)] * 3 + [float(number + 1)] * 3
    close()
    return {"right": right, "dropped": wire.dropped, "slow": sum(each > 0.008 for each in waits)}


def over_a_transport() -> dict[str, Any]:
    """Three messages over an edge that torch's functions carry, each lost once, and what arrives of them."""
    start()
    edge = Edge(0, 1, FORWARD)
    carried = CollectiveTransport([dist.group.WORLD], torch.device("cpu"))
    carried.prepare([edge])
    seam._exchange = SimpleNamespace(transport=carried, close=lambda: None)  # type: ignore[assignment]
    wire, close = _opened(lost=1, rate=1.0, timeout=0.001, seed=4, offset=0.5)
    transport = seam._exchange.transport
    ended, got = True, []
    for number in range(3):
        if wire.rank == 0:
            transport.post_send(edge, torch.full((4,), float(number)), with_shape=number == 1)
        else:
            # The second is received as what it is, without a shape.
            shape = None if number == 1 else (4,)
            got.append(transport.post_recv(edge, shape, torch.float32).wait(20.0).tolist())
    if wire.rank == 0:
        thread = threading.Thread(target=carried.finish, daemon=True)
        thread.start()
        thread.join(20.0)
        ended = not thread.is_alive()
    close()
    seam._exchange = None
    return {"got": got, "ended": ended, "dropped": wire.dropped}


def groups() -> list[float]:
    """Sums over four ranks with an offset between 1 and 2: by members alone, and by the group's name."""
    start()
    found = []
    with bench("--tensor-model-parallel-size 4 --num-query-groups 4"):
        for group in (None, "tp", "dp"):
            wire = Wire(rank=dist.get_rank(), ends=(1, 2), group=group, offset=0.5)
            close = open_wire(wire)
            wire.on = True
            value = torch.zeros(1)
            dist.all_reduce(value, group=parallel_state.get_tensor_model_parallel_group())
            found.append(float(value))
            close()
    return found


def trained(flags: str, given: dict[str, Any], transport: str = "") -> dict[str, Any]:
    """Losses and final state of three steps without a perturbation, with it, and after its undo."""
    start()
    found: dict[str, Any] = {}
    with bench(f"{flags} {transport}") as clean:
        found["clean"] = [clean.step().loss for _ in range(3)]
        state = clean.digest()
    with bench(f"{flags} {transport}") as run:
        run.lab.handlers["arm"](entry(**given))
        began = time.perf_counter()
        found["perturbed"] = [run.step().loss for _ in range(3)]
        found["seconds"] = time.perf_counter() - began
        found["same bits"] = run.digest() == state
        run.lab.undo()
        found["undone"] = [run.step().loss for _ in range(3)]
        found["back"] = run.digest() == state
    found["restored"] = not wires._bound and not events.listening()
    return found


def delays(milliseconds: float, count: int) -> dict[str, list[float]]:
    """Milliseconds that each of ``count`` operations took longer than those before and after it; of
    asynchronous ones, from their start to the end of the wait."""
    start()
    peer = 1 - dist.get_rank()
    tensor = torch.ones(64)

    def collective() -> None:
        with collectives.announced("all_reduce", "dp", None, tensor):
            dist.all_reduce(tensor)

    def transfer() -> None:
        received = torch.zeros(64)
        attrs = {"group": "pp", "ranks": (0, 1), "bytes": 256, "transfers": (("recv", peer, 0, 256),)}
        with events.described("p2p", dict(attrs)):
            works = [dist.isend(tensor, peer), dist.irecv(received, peer)]
            for work in works:
                work.wait()

    def asynchronous() -> None:
        attrs = {"op": "all_reduce", "group": "dp", "ranks": (0, 1), "seq": 0, "bytes": 256}
        with events.described("collective", {**attrs, "asynchronous": "start"}):
            work = dist.all_reduce(tensor, async_op=True)
        with events.described("collective", {**attrs, "asynchronous": "wait"}):
            work.wait()

    found = {}
    with bench("") as run:
        run.lab.handlers["arm"](entry(kind="delay", ms=milliseconds, ranks=[0, 1], steps="1-"))
        run.lab.begin_step(1)
        acting = run.lab._armed[0].acting
        assert acting is not None
        for name, operation in (
            ("all_reduce", collective),
            ("p2p", transfer),
            ("asynchronous", asynchronous),
        ):
            longer = []
            for _ in range(count):
                usual = []
                for on in (False, True, False):
                    if on:
                        acting.before_step(1)
                    else:
                        acting.rest()
                    dist.barrier()
                    began = time.perf_counter()
                    operation()
                    usual.append(1e3 * (time.perf_counter() - began))
                # What goes on in the background is over no earlier than the delay after its start.
                without = 0.0 if name == "asynchronous" else statistics.mean((usual[0], usual[2]))
                longer.append(usual[1] - without)
            found[name] = longer
        run.lab.end_step(1)
    return found
