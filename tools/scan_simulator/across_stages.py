"""Collectives at a step's end, among ranks of any stages: gradients, their norm, the loss, parameters."""

from __future__ import annotations

from .collectives import doubling, ring
from .hosts import Hosts
from .job import Job
from .noise import Floats, Noise
from .ways import Tables
from .work import Communication


class AcrossStages:
    """Takes the times at which ranks come and gives those at which they leave, [pp, dp, cp, tp]."""

    def __init__(self, job: Job, noise: Noise, tables: Tables, hosts: Hosts) -> None:
        self._job, self._noise, self._tables, self._hosts = job, noise, tables, hosts

    def small(self, now: Floats, group: str) -> Floats:
        """An all-reduce of a few bytes."""
        rows = self._tables.members(group)
        latency, _ = self._tables.doubling(group)
        jitter = self._noise.factors(f"small {group}", latency.shape, 4 * self._job.link_jitter)
        left: Floats = now.copy()
        flat = left.reshape(-1)
        flat[rows] = doubling(flat[rows], latency * jitter, self._hosts.hold_rows(rows))
        return left

    def large(self, now: Floats, what: Communication) -> Floats:
        """A ring."""
        rows = self._tables.members(what.group)
        latency, per_byte = self._tables.ring(what.group)
        size, hops = ring_sizes(what, rows.shape[-1])
        factor = self._noise.factors(f"large {what.group}", rows.shape, self._job.link_jitter)
        delay = self._noise.delays(f"large {what.group}", rows.shape) / hops
        gap = per_byte * size * factor + delay
        left: Floats = now.copy()
        flat = left.reshape(-1)
        flat[rows] = ring(flat[rows], gap, latency, hops, self._hosts.hold_rows(rows))
        return left


def ring_sizes(what: Communication, members: int) -> tuple[float, int]:
    """Bytes of each hop, and hops."""
    if what.op == "all_reduce":
        return what.size / members, 2 * (members - 1)
    if what.op == "reduce_scatter":
        return what.size / members, members - 1
    return float(what.size), members - 1
