"""A lost pipeline rank whose micro-batches its data-parallel replicas take over (ReCycle, arXiv 2405.14009).

Every replica of a pipeline holds the same stages, so the micro-batches of a lost rank can run on the ranks
of the other replicas that hold its stage: their bubbles take up part of the further work. Messages take no
time here, and the time to notice the loss and to set up again is not counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from ...errors import ConfigError
from ..actions import Kind
from .costs import Costs, per_stage

_Batch = tuple[int, int]
"""Number within its replica, and replica."""


@dataclass
class _Worker:
    """One rank: its stage, what it may begin, what it keeps."""

    stage: int
    cap: int
    forwards: list[_Batch] = field(default_factory=list)
    backwards: list[_Batch] = field(default_factory=list)
    deferred: deque[_Batch] = field(default_factory=deque)
    kept: int = 0
    busy: bool = False


def rerouted_makespan(
    ranks: int, microbatches: int, replicas: int, costs: Costs, *, lost: int | None, split: bool = False
) -> float:
    """Seconds of a step of ``replicas`` pipelines of ``ranks`` ranks with one chunk each and ``microbatches``
    micro-batches per replica, backwards first (1F1B). ``lost``: the stage whose rank the first replica has
    lost, None for none. ``split``: weight gradients run when nothing else is ready. Raises ConfigError
    where no replica is left."""
    if lost is not None and not (0 <= lost < ranks and replicas > 1):
        raise ConfigError(
            f"found stage {lost} of {ranks} lost with {replicas} replicas; expected a stage of the pipeline "
            "and at least 2 replicas"
        )
    seconds = {
        Kind.F: per_stage(costs.forward, ranks, microbatches, "forward"),
        Kind.B: per_stage(costs.backward, ranks, microbatches, "backward"),
        Kind.W: per_stage(0.0 if costs.weight is None else costs.weight, ranks, microbatches, "weight"),
    }
    if split:
        if costs.weight is None:
            raise ConfigError("found no time of weight gradients, which a split backward needs")
        seconds[Kind.B] = seconds[Kind.B] - seconds[Kind.W]

    def place(batch: _Batch, stage: int) -> tuple[int, int]:
        """Replica and stage of the rank that runs ``batch``."""
        number, replica = batch
        if stage == lost and replica == 0:
            replica = 1 + number % (replicas - 1)
        return replica, stage

    batches = [(number, replica) for number in range(microbatches) for replica in range(replicas)]
    workers: dict[tuple[int, int], _Worker] = {}
    for stage in range(ranks):
        load: dict[tuple[int, int], int] = {}
        for batch in batches:
            load[place(batch, stage)] = load.get(place(batch, stage), 0) + 1
        for key, count in load.items():
            # As far ahead as 1F1B, in proportion to what it has to do.
            workers[key] = _Worker(stage, ceil((ranks - stage) * count / microbatches))
    for batch in batches:
        workers[place(batch, 0)].forwards.append(batch)

    events: list[tuple[float, tuple[int, int], Kind, _Batch]] = []
    end = 0.0

    def begin(key: tuple[int, int], now: float) -> None:
        worker = workers[key]
        if worker.busy:
            return
        if worker.backwards:
            kind, batch = Kind.B, heappop(worker.backwards)
        elif worker.forwards and worker.kept < worker.cap:
            kind, batch = Kind.F, heappop(worker.forwards)
            worker.kept += 1
        elif worker.deferred:
            kind, batch = Kind.W, worker.deferred.popleft()
        else:
            return
        worker.busy = True
        heappush(events, (now + seconds[kind][worker.stage, batch[0]], key, kind, batch))

    for key in workers:
        begin(key, 0.0)
    while events:
        end, key, kind, batch = heappop(events)
        worker = workers[key]
        worker.busy = False
        following = None
        if kind is Kind.F:
            following = place(batch, min(worker.stage + 1, ranks - 1))
            last = worker.stage == ranks - 1
            heappush(workers[following].backwards if last else workers[following].forwards, batch)
        elif kind is Kind.B:
            if split:
                worker.deferred.append(batch)
            else:
                worker.kept -= 1
            if worker.stage > 0:
                following = place(batch, worker.stage - 1)
                heappush(workers[following].backwards, batch)
        else:
            worker.kept -= 1
        begin(key, end)
        if following is not None:
            begin(following, end)
    return float(end)
