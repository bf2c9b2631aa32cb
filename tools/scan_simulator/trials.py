"""Draws jobs and faults for judging a detector: which layouts, what is wrong, since when.

A fault that is there from the first step can only be found by comparing with others that do the same; where
nobody does, it begins in the middle of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .engine import Engine
from .faults import Fault, used_pairs
from .job import Job
from .layout import Layout

STEPS = 48
_ONSETS = (13, 30)
"""The step in which a fault begins that is not there from the first on: drawn between these."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One simulated run to be judged."""

    category: str
    """``compute +20%``, ``link pp`` ...: what it counts for."""

    job: Job
    faults: tuple[Fault, ...]
    seed: int

    def lost_fraction(self, step_seconds: Sequence[float]) -> float:
        """What the faults cost of the time since the first began: ``step_seconds`` of this trial's truth
        beside the same run without them."""
        if not self.faults:
            return 0.0
        first = min(fault.first for fault in self.faults)
        if len(step_seconds) < self.job.steps:
            return 1.0
        engine = Engine(self.job, (), self.seed)
        began = 0.0
        for number in range(1, self.job.steps + 1):
            if number == first:
                began = float(engine.now.max())
            engine.step()
        usual = (float(engine.now.max()) - began) / 1e9
        return 1 - usual / sum(step_seconds[first - 1 :])


def single(category: str, seed: int) -> Trial:
    """The trial of ``category`` (one of ``SINGLE``) with ``seed``."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, *category.encode()]))
    needs, make = SINGLE[category]
    while True:
        job = _job(generator, **needs)
        fault = make(job, generator)
        if quotas_bind(job, (fault,), seed):
            return Trial(category=category, job=_with_steps(job, fault), faults=(fault,), seed=seed)


def double(seed: int) -> Trial:
    """Two faults of different ranks or links at the same time."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, *b"two"]))
    kinds: list[Callable[[Job, np.random.Generator], Fault]] = [
        _slow_compute(1.2),
        _slow_compute(1.3),
        _slow_link(),
        _slow_link(),
        _contention,
    ]
    while True:
        job = _job(generator, world=4)
        chosen = generator.choice(len(kinds), 2, replace=False)
        first, second = (kinds[index](job, generator) for index in chosen)
        if {*first.culprits(job.layout)} & {*second.culprits(job.layout)}:
            continue
        pair = first, replace(second, first=first.first if generator.random() < 0.5 else second.first)
        if quotas_bind(job, pair, seed):
            return Trial(category="two at once", job=job, faults=pair, seed=seed)


def quotas_bind(job: Job, faults: Sequence[Fault], seed: int) -> bool:
    """Whether each quota among ``faults`` stops its rank at least once: one that is never reached changes
    nothing in the whole run, and calling that run faulty would be a false label."""
    limited = {fault.rank for fault in faults if fault.cause == "host_contention" and fault.mode == "quota"}
    if not limited:
        return True
    engine = Engine(job, faults, seed)
    stopped: dict[int, float] = {}
    for _ in range(job.steps):
        stopped = engine.step().throttled
    return all(stopped.get(rank, 0.0) > 0 for rank in limited if rank is not None)


def clean(seed: int, steps: int) -> Trial:
    """Nothing wrong but the usual unsteadiness."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, *b"clean"]))
    job = _job(generator, most=16)
    return Trial(category="clean", job=replace(job, steps=steps), faults=(), seed=seed)


def _job(
    generator: np.random.Generator,
    *,
    world: int = 2,
    most: int = 128,
    group: str | None = None,
    hosts: int = 1,
    experts: bool | None = None,
    of_three: bool = False,
) -> Job:
    """DP 1-8 x TP 1-4 x PP 1-4, some with context or expert parallelism, chunks that interleave, two or four
    machines; ``group`` is a kind that must have links, ``of_three`` wants groups of three and more."""
    while True:
        dp, tp, pp = (int(generator.choice(sizes)) for sizes in ((1, 2, 3, 4, 8), (1, 2, 4), (1, 2, 3, 4)))
        cp = 2 if generator.random() < 0.15 else 1
        wants_experts = generator.random() < 0.25 if experts is None else experts
        ep = max(each for each in (1, 2, 4) if dp % each == 0) if wants_experts else 1
        vpp = 2 if pp > 1 and generator.random() < 0.25 else 1
        layout = Layout(
            dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, vpp=vpp, ranks_per_node=int(generator.choice((4, 8)))
        )
        sizes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
        if not world <= layout.world_size <= most or layout.hosts < hosts:
            continue
        if (group is not None and sizes[group] < 2) or (experts and ep < 2):
            continue
        if of_three and tp < 3 and (dp < 3 or cp > 1):
            continue
        return Job(
            layout=layout,
            steps=STEPS,
            microbatches=pp * int(generator.choice((1, 2, 3)))
            if vpp > 1
            else int(generator.choice((4, 6, 8))),
            layers=int(generator.choice((1, 2))),
            packed=bool(ep == 1 and generator.random() < 0.2),
            distributed_optimizer=bool(generator.random() < 0.4),
        )


def _with_steps(job: Job, fault: Fault) -> Job:
    return replace(job, checkpoint_every=8) if fault.cause == "slow_checkpoint" else job


def _onset(generator: np.random.Generator, comparable: bool) -> int:
    late = int(generator.integers(*_ONSETS))
    return 1 if comparable and generator.random() < 0.3 else late


def _rank(job: Job, generator: np.random.Generator) -> tuple[int, bool]:
    """A rank, and whether others do the same as it."""
    layout = job.layout
    return int(generator.integers(layout.world_size)), layout.dp * layout.tp * layout.cp > 1


def _slow_compute(factor: float) -> Callable[[Job, np.random.Generator], Fault]:
    def make(job: Job, generator: np.random.Generator) -> Fault:
        rank, comparable = _rank(job, generator)
        return Fault(cause="slow_compute", rank=rank, factor=factor, first=_onset(generator, comparable))

    return make


def _contention(job: Job, generator: np.random.Generator) -> Fault:
    rank, comparable = _rank(job, generator)
    return Fault(
        cause="host_contention",
        rank=rank,
        share=float(generator.uniform(0.2, 0.5)),
        mode=str(generator.choice(("load", "quota"))),
        first=_onset(generator, comparable),
    )


def _pause(job: Job, generator: np.random.Generator) -> Fault:
    rank, _ = _rank(job, generator)
    return Fault(
        cause="host_pause",
        rank=rank,
        seconds=float(generator.uniform(0.2, 1.0)),
        every=int(generator.choice((1, 2, 3))),
        mode=str(generator.choice(("stop", "gc"))),
        first=_onset(generator, True),
    )


def _data(job: Job, generator: np.random.Generator) -> Fault:
    rank, comparable = _rank(job, generator)
    # A worker that is slow only as long as the pipeline's bubbles let it catch up harms nobody.
    period = (job.microbatches + job.layout.pp) / job.microbatches
    return Fault(
        cause="slow_data",
        rank=rank,
        factor=period / job.data_part * float(generator.uniform(1.5, 2.5)),
        first=_onset(generator, comparable),
    )


def _checkpoint(job: Job, generator: np.random.Generator) -> Fault:
    rank, _ = _rank(job, generator)
    return Fault(
        cause="slow_checkpoint",
        rank=rank,
        factor=float(generator.uniform(2, 4)),
        first=1 if generator.random() < 0.5 else 25,
    )


def _uneven(job: Job, generator: np.random.Generator) -> Fault:
    rank, _ = _rank(job, generator)
    return Fault(
        cause="uneven_work",
        rank=rank,
        factor=float(generator.uniform(1.3, 1.6)),
        first=_onset(generator, True),
    )


def _slowness(generator: np.random.Generator) -> dict[str, Any]:
    return {"latency_ms": 5.0} if generator.random() < 0.5 else {"bandwidth": 0.25}


def _slow_link(group: str | None = None) -> Callable[[Job, np.random.Generator], Fault]:
    """A pair of ``group``, or of any."""

    def make(job: Job, generator: np.random.Generator) -> Fault:
        pairs = _pairs(job.layout, group)
        pair = pairs[int(generator.integers(len(pairs)))]
        local = [_local(job.layout, each) == _local(job.layout, pair) for each in pairs]
        first = _onset(generator, sum(local) > 1)
        return Fault(cause="slow_link", ranks=pair, first=first, **_slowness(generator))

    return make


def _pairs(layout: Layout, group: str | None) -> list[tuple[int, int]]:
    wanted = "dp-cp" if group == "dp" and layout.cp > 1 else group
    return [pair for pair, kinds in used_pairs(layout).items() if wanted is None or wanted in kinds]


def _local(layout: Layout, pair: tuple[int, int]) -> bool:
    return layout.host_of(pair[0]) == layout.host_of(pair[1])


def _slow_group(job: Job, generator: np.random.Generator) -> Fault:
    layout = job.layout
    kinds = [name for name, size in (("tp", layout.tp), ("dp", layout.dp)) if size > 2]
    if layout.cp > 1:
        kinds = ["tp"]
    group = str(generator.choice(kinds))
    rank = int(generator.integers(layout.world_size))
    first = _onset(generator, len(layout.members(group)) > 1)
    return Fault(cause="slow_group", group=group, rank=rank, first=first, **_slowness(generator))


def _slow_node(job: Job, generator: np.random.Generator) -> Fault:
    host = int(generator.integers(job.layout.hosts))
    first = _onset(generator, False)
    return Fault(cause="slow_node_link", host=host, first=first, **_slowness(generator))


def _hang(job: Job, generator: np.random.Generator) -> Fault:
    rank, _ = _rank(job, generator)
    return Fault(cause="hang", rank=rank, first=_onset(generator, False))


Make = Callable[[Job, np.random.Generator], Fault]
SINGLE: dict[str, tuple[dict[str, Any], Make]] = {
    "compute +20%": ({}, _slow_compute(1.2)),
    "compute +10%": ({}, _slow_compute(1.1)),
    "link pp": ({"group": "pp"}, _slow_link("pp")),
    "link tp": ({"group": "tp"}, _slow_link("tp")),
    "link dp": ({"group": "dp"}, _slow_link("dp")),
    "link ep": ({"group": "ep", "experts": True}, _slow_link("ep")),
    "host contention": ({}, _contention),
    "host pause": ({}, _pause),
    "slow data": ({}, _data),
    "slow checkpoint": ({}, _checkpoint),
    "uneven work": ({"experts": True, "world": 4}, _uneven),
    "slow group": ({"of_three": True}, _slow_group),
    "slow node link": ({"hosts": 3}, _slow_node),
    "hang": ({}, _hang),
}
"""Category -> what its job needs, and the fault's draw."""
