"""Faults made in a running rank, for drills and tests: real extra work, real stops, real waits.

The rank listens at the event seam while a fault is asked for, and not otherwise. What it does it does inside
the event (after the recorder has taken the begin), as a slow card or link would. Every fault has an end;
nothing outlives the process.

``skew_routers``: more tokens for one rank's experts, by adding to their scores in its routers.
"""

from __future__ import annotations

import logging
import random
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mt_megatron.backends.threads import RankThread
from mt_megatron.seams import events

from .faults import Fault
from .links import LinkDelays, SlowLink
from .load import Products, busy_process, stop_this_process, write_for

logger = logging.getLogger("mt_megatron")

_LISTENING = frozenset({"slow_compute", "slow_link", "jitter", "slow_data"})
_WORK = frozenset({"forward", "backward"})
_WAITS = frozenset({"collective", "p2p"})
_DRIFT = 0.02


class Injector:
    """The faults of one rank. ``set`` is called from any one thread; ``close`` undoes everything."""

    def __init__(self, rank: int, scratch: Path, backend: Any) -> None:
        """``scratch``: a folder for the disk's load; ``backend`` a ``mt_megatron.backends.base.Backend``."""
        self._rank = rank
        self._scratch = scratch / f"drill-{rank:05d}.tmp"
        self._backend = backend
        self._faults: tuple[Fault, ...] = ()
        self._undo: list[Callable[[], None]] = []

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Those of this rank that are on."""
        return self._faults

    def set(self, faults: Sequence[Fault]) -> None:
        """Have these faults and no others."""
        own = tuple(one for one in faults if self._concerns(one))
        if own == self._faults:
            return
        self.close()
        try:
            for one in own:
                self._begin(one)
        except BaseException:
            self.close()
            raise
        if any(one.kind in _LISTENING for one in own):
            heard = _Heard(self._rank, own, self._backend, self._scratch)
            self._undo.append(events.subscribe(heard))
        self._faults = own

    def close(self) -> None:
        """Undo everything."""
        self._faults = ()
        while self._undo:
            self._undo.pop()()

    def _concerns(self, fault: Fault) -> bool:
        # Every rank that sends tokens to the experts has to send more of them.
        return fault.kind == "uneven_work" or self._rank in fault.ranks

    def _begin(self, fault: Fault) -> None:
        figures = fault.figures
        if fault.kind == "host_pause":
            pauses = _Pauses(figures["seconds"], figures["every"])
            self._undo.append(pauses.close)
        elif fault.kind == "host_contention":
            for _ in range(max(1, round(figures["processes"]))):
                self._undo.append(partial(_end, busy_process()))
        elif fault.kind == "uneven_work":
            self._undo.append(skew_routers(fault.ranks, figures["bias"]))


class _Heard:
    """Makes the events of this rank take longer. What fails in it is said once and ends it."""

    def __init__(self, rank: int, faults: Sequence[Fault], backend: Any, scratch: Path) -> None:
        self._on = True
        self._backend = backend
        self._scratch = scratch
        by_kind = {kind: [one for one in faults if one.kind == kind] for kind in _LISTENING}
        self._factor = 1.0
        for one in by_kind["slow_compute"]:
            self._factor *= one.figures["factor"]
        self._jitter = sum(one.figures["ms"] for one in by_kind["jitter"]) / 1e3
        self._disk = sum(one.figures["ms"] for one in by_kind["slow_data"]) / 1e3
        self._links = LinkDelays(
            rank,
            [
                SlowLink(ranks=frozenset(one.ranks), seconds=one.figures["latency_ms"] / 1e3)
                for one in by_kind["slow_link"]
            ],
        )
        self._random = random.Random(rank)
        self._products: Products | None = None
        self._usual: dict[str, float] = {}
        self._local = threading.local()

    def __call__(self, phase: events.Phase, name: events.EventName, attrs: Mapping[str, Any]) -> None:
        if not self._on:
            return
        try:
            self._hear(phase, name, attrs)
        except Exception as error:  # noqa: BLE001 - a drill never ends training
            self._on = False
            logger.warning("the drill in this rank has ended: %s: %s", type(error).__name__, error)

    def _hear(self, phase: str, name: str, attrs: Mapping[str, Any]) -> None:
        if name in _WAITS:
            self._wait(phase, attrs)
        elif name in _WORK:
            self._work(phase, name)
        elif name in ("data", "checkpoint") and phase == "begin" and self._disk:
            write_for(self._disk * (10 if name == "checkpoint" else 1), self._scratch)

    def _wait(self, phase: str, attrs: Mapping[str, Any]) -> None:
        local, now = self._local, time.perf_counter()
        if not self._links.hear(phase, attrs):
            return
        if phase == "begin":
            local.began = now
        else:
            local.waited = getattr(local, "waited", 0.0) + now - getattr(local, "began", now)

    def _work(self, phase: str, name: str) -> None:
        if phase == "end":
            self._learn(name)
            return
        if self._jitter:
            time.sleep(min(20 * self._jitter, self._random.expovariate(1 / self._jitter)))
        if self._factor > 1:
            if self._products is None:
                # Here and not earlier: the training thread knows its device.
                self._products = Products(self._backend)
            if name in self._usual:
                self._products.burn((self._factor - 1) * self._usual[name])
            elif self._backend.device_type != "cpu":
                self._backend.synchronize()  # once per name, to know what the device takes
            self._local.work = (name, time.perf_counter(), getattr(self._local, "waited", 0.0))

    def _learn(self, name: str) -> None:
        known = getattr(self._local, "work", None)
        if self._products is None or known is None or known[0] != name:
            return
        self._local.work = None
        on_host = self._backend.device_type == "cpu"
        if not on_host and name in self._usual:
            return
        self._backend.synchronize()
        waited = getattr(self._local, "waited", 0.0) - known[2]
        own = max(0.0, time.perf_counter() - known[1] - waited)
        # The lower of what is usual: one that was held up by others is not this rank's measure.
        before = self._usual.get(name, own)
        self._usual[name] = min(own, before) if own < before else before + _DRIFT * (own - before)


class _Pauses:
    """Stops this process again and again."""

    def __init__(self, seconds: float, every: float) -> None:
        self._seconds = seconds
        self._every = every
        self._stopped = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = RankThread(target=self._run, name="scan-pauses", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(self._seconds + 5.0)

    def _run(self) -> None:
        while not self._stopped.is_set():
            child = stop_this_process(self._seconds)
            child.wait()
            self._stopped.wait(self._every - self._seconds)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


_ROUTER = "TopKRouter"


def skew_routers(ranks: Sequence[int], bias: float) -> Callable[[], None]:
    """Let the routers of this process prefer the experts of ``ranks`` from now on; returns what ends it.

    Nothing happens in a process whose expert-parallel group holds none of ``ranks``, or that has no router.
    """
    import torch
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    members = torch.distributed.get_process_group_ranks(group)
    places = [members.index(rank) for rank in ranks if rank in members]
    size = len(members)
    met: list[Any] = []

    def meet(module: Any, inputs: Any) -> None:
        if type(module).__name__ != _ROUTER or "gating" in module.__dict__:
            return
        gating = module.gating

        def skewed(*args: Any, **kwargs: Any) -> Any:
            logits = gating(*args, **kwargs)
            local = logits.shape[-1] // size
            extra = torch.zeros_like(logits[..., :1]).expand_as(logits).clone()
            for place in places:
                extra[..., place * local : (place + 1) * local] = bias
            return logits + extra

        module.gating = skewed
        met.append(module)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(meet)

    def end() -> None:
        handle.remove()
        for module in met:
            module.__dict__.pop("gating", None)

    return end
