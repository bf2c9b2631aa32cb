"""The ranks' side of the tests of measurements, stalls and drills: three Gloo ranks, one of them slow."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.parallel.rank_layout import RankLayout
from mt_megatron.scan import session
from mt_megatron.scan.drill.inject import skew_routers
from mt_megatron.scan.respond.confirm import Request, measure
from mt_megatron.scan.respond.measures import Measures
from mt_megatron.scan.respond.selftest import selftest
from mt_megatron.scan.respond.stacks import evidence
from mt_megatron.scan.session import Session
from mt_megatron.seams import collectives, events
from tests.layers.moe.bias_ranks import config_of, layout

_TRIALS = 4
"""Measurements of one suspect at most. A busy machine can leave one open, which is an honest result, and is
measured again; a wrong verdict ends the trials."""


class Slow(Measures):
    """Rank 1 computes everything six times; between ranks 0 and 2 lies a wait."""

    def products(self, count: int) -> float:
        return super().products(6 * count if dist.get_rank() == 1 else count)

    def exchange(self, peer: int, *, first: bool, nbytes: int, repeats: int) -> list[float]:
        if {dist.get_rank(), peer} != {0, 2}:
            return super().exchange(peer, first=first, nbytes=nbytes, repeats=repeats)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            if not first:
                time.sleep(0.02)
            super().exchange(peer, first=first, nbytes=nbytes, repeats=1)
            times.append(time.perf_counter() - began)
        return times


def measured() -> dict[str, Any]:
    """Everything that needs several ranks, in one job."""
    found: dict[str, Any] = {}
    with layout(ep=3):
        import mt_megatron

        backend, rank, world = mt_megatron.backend(), dist.get_rank(), dist.get_world_size()
        measures = Slow(backend, size=128)
        for what, ranks in (("compute", (1,)), ("compute", (0,)), ("link", (0, 2)), ("link", (0, 1))):
            name = " ".join(map(str, (what, *ranks)))
            request = Request(identity=name, what=what, ranks=ranks)  # type: ignore[arg-type]
            for _ in range(_TRIALS):
                found[name] = measure(request, measures, rank, ["here"] * world).to_dict()
                if found[name]["verdict"] != "inconclusive":
                    break
        found["measures_text"] = measures.broadcast("äöü" if rank == 0 else "")
        with tempfile.TemporaryDirectory() as folder:
            made = selftest(backend, rank=rank, world_size=world, folder=Path(folder), measures=measures)
        found["selftest"] = made.to_dict()
        found["evidence"] = _stuck(rank)
        found["tokens"] = _routed()
        found["numbers"] = _numbered(backend, measures, rank, world)
    return found


def _numbered(backend: Any, measures: Measures, rank: int, world: int) -> list[list[int]]:
    """Numbers of this rank's collectives in two sessions and, the control, in a third that begins while
    rank 0 has another one open. Before and between them single ranks listen."""
    seen: list[int] = []

    def hear(phase: Any, name: Any, attrs: Any) -> None:
        if phase == "begin" and name == "collective" and attrs["group"] == "world":
            seen.append(attrs["seq"])

    def reduce(count: int) -> None:
        one = torch.zeros(1)
        for _ in range(count):
            with collectives.announced("all_reduce", "world", None, one):
                dist.all_reduce(one)

    found = []
    with tempfile.TemporaryDirectory() as own:
        folder = measures.broadcast(own)
        for number in range(3):
            alone = events.subscribe(hear) if rank == number % 2 else None
            reduce(2 + number)
            if alone is not None:
                alone()
            traced = Session(folder, rank=rank, layout=RankLayout(world_size=world), backend=backend)
            if number == 2 and rank == 0:
                other = Session(own, rank=0, layout=RankLayout(world_size=1), backend=backend)
                session._traced.add(other)
            traced.start()
            seen.clear()
            stop = events.subscribe(hear)
            reduce(3)
            stop()
            traced.close()
            found.append(list(seen))
            dist.barrier()
        session._traced.clear()
    return found


def _stuck(rank: int) -> dict[str, Any]:
    """Rank 1 comes late to an all-reduce; the others say where they wait, it says that it does not."""
    taken: list[dict[str, Any]] = []
    seen = threading.Event()

    def look() -> None:
        time.sleep(0.7)
        taken.append(evidence(0.7))
        seen.set()

    thread = threading.Thread(target=look)
    dist.barrier()
    thread.start()
    if rank == 1:
        seen.wait(30)
        time.sleep(1.0)
    dist.all_reduce(torch.zeros(4))
    thread.join()
    return taken[0]


def _routed() -> list[list[int]]:
    """Tokens per expert before, while and after rank 2's experts are preferred."""
    from megatron.core.transformer.moe.router import TopKRouter

    router = TopKRouter(
        config_of(num_moe_experts=3, moe_router_topk=1, moe_router_load_balancing_type="none")
    )
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
    hidden = torch.randn(30, 1, router.weight.shape[1], generator=torch.Generator().manual_seed(2))

    def tokens() -> list[int]:
        counts = torch.bincount(router(hidden)[1].flatten(), minlength=3)
        return [int(count) for count in counts]

    before = tokens()
    end = skew_routers((2,), 1000.0)
    during = tokens()
    end()
    return [before, during, tokens()]
