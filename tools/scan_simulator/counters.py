"""Host facts of simulated ranks: what a recorder's thread would have read at every flush."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.format.records import COUNTER, FLUSH_SECONDS
from mt_megatron.scan.record.writer import BEAT_SECONDS

from .engine import Step
from .faults import Fault
from .job import Job
from .noise import Floats, Noise
from .stops import PERIOD

_EVERY = 1e9 * FLUSH_SECONDS
_BEAT = 1e9 * BEAT_SECONDS
_BEATS = round(FLUSH_SECONDS / BEAT_SECONDS)
_STOPPED = 50e6

NAMES = (
    "beat_delay_ns",
    "process_cpu_ns",
    "run_queue_wait_ns",
    "major_faults",
    "minor_faults",
    "voluntary_switches",
    "involuntary_switches",
    "gc_pause_ns",
    "steal_fraction",
    "throttled_ns",
    "data_queue_depth",
)
_SUMS = NAMES[1:8]


class HostCounters:
    """Samples of every rank, step after step."""

    def __init__(self, job: Job, noise: Noise, first_string: int) -> None:
        """``first_string`` is the number of ``NAMES[0]`` in the files' tables of strings."""
        world = job.layout.world_size
        self._job, self._noise = job, noise
        self._names = np.arange(first_string, first_string + len(NAMES), dtype=np.uint16)
        self._sums = np.zeros((len(_SUMS), world))
        self._throttled = np.zeros(world)
        self._since = np.zeros(world)
        self._gone: set[int] = set()
        self._next = noise.generator("samples").uniform(0, _EVERY, world)

    def after(
        self, step: Step, depth: Floats, faults: list[Fault]
    ) -> tuple[dict[int, tuple[Floats, NDArray[np.void]]], list[tuple[int, float, float]]]:
        """Of the time of ``step``: rank -> true times and records without them; and pauses of the whole
        process that the recorder's thread would have noticed (rank, begin, end).

        ``depth`` [ranks] are the data queues' lengths at the step's end.
        """
        generator = self._noise.generator("samples")
        over = step.over.ravel()
        before = self._sums.copy()
        throttled_before = self._throttled.copy()
        self._add(step, generator)
        loads = {fault.rank: fault for fault in faults if fault.cause == "host_contention"}
        made: dict[int, tuple[Floats, NDArray[np.void]]] = {}
        noticed: list[tuple[int, float, float]] = []
        stops: dict[int, list[tuple[float, float]]] = {}
        for rank, name, begin, end in step.pauses:
            if name == "stopped":
                stops.setdefault(rank, []).append((begin, end))
        for rank in range(len(over)):
            if rank in self._gone:
                continue
            hanging = not np.isfinite(over[rank])
            if hanging:
                # What it wrote while it waited is written now, whatever the others do in steps to come.
                self._gone.add(rank)
            until = self._since[rank] + 12e9 if hanging else over[rank]
            times = np.arange(self._next[rank], until, _EVERY)
            if not len(times):
                continue
            self._next[rank] = times[-1] + _EVERY
            late = np.where(generator.random(len(times)) < 0.02, generator.exponential(2e6, len(times)), 0.0)
            if rank in loads:
                late = np.maximum(late, self._starved(loads[rank], len(times), generator))
            for begin, end in stops.get(rank, ()):
                inside = (times >= begin) & (times < end)
                if np.isinf(end):
                    times, late = times[~inside], late[~inside]
                    continue
                planned = begin + generator.uniform(0, _BEAT)
                if end - planned < 0:
                    continue
                times = np.append(times[~inside], end)
                late = np.append(late[~inside], end - planned)
                order = np.argsort(times, kind="stable")
                times, late = times[order], late[order]
                if end - planned >= _STOPPED:
                    noticed.append((rank, planned, end))
            part = np.clip((times - self._since[rank]) / max(until - self._since[rank], 1.0), 0, 1)
            values = np.zeros((len(times), len(NAMES)))
            values[:, 0] = np.where(late >= 1e6, late, 0.0)
            values[:, 1:8] = before[:, rank] + part[:, None] * (self._sums[:, rank] - before[:, rank])
            values[:, 9] = throttled_before[rank] + part * (self._throttled[rank] - throttled_before[rank])
            values[:, 10] = depth[rank]
            records = np.zeros(values.shape, COUNTER)
            records["value"], records["name"] = values, self._names
            made[rank] = np.repeat(times, len(NAMES)), records.ravel()
        self._since = np.where(np.isfinite(over), over, self._since + 12e9)
        return made, noticed

    def _add(self, step: Step, generator: np.random.Generator) -> None:
        job = self._job
        world = len(self._since)
        collected = np.zeros(world)
        for rank, name, begin, end in step.pauses:
            if name == "gc" and np.isfinite(end):
                collected[rank] += end - begin
        # While threads stand still for a quota they are ready to run, and the run queue counts it too.
        queued = step.draws.queued.ravel().copy()
        for rank, throttled in step.throttled.items():
            queued[rank] += throttled - self._throttled[rank]
            self._throttled[rank] = throttled
        own = step.busy.ravel() - step.draws.queued.ravel()
        passes = job.microbatches * 2 * job.layout.vpp
        self._sums += np.stack(
            [
                np.where(np.isfinite(own), np.maximum(own, 0), 0.0),
                queued,
                (generator.random(world) < 0.01).astype(float),
                generator.poisson(40, world).astype(float),
                generator.poisson(6 * passes, world).astype(float),
                step.draws.switches.ravel(),
                collected,
            ]
        )

    def _starved(self, fault: Fault, count: int, generator: np.random.Generator) -> Floats:
        """How late the recorder's own thread wakes beside the fault: the latest of a sample's beats."""
        shape = _BEATS, count
        hit = generator.random(shape) < fault.share
        if fault.mode == "quota":
            delays = generator.uniform(0, fault.share * PERIOD, shape)
        else:
            delays = generator.exponential(4e6, shape)
        latest: Floats = (hit * delays).max(axis=0)
        return latest
