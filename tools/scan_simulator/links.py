"""What each link takes: latency and time per byte between any two ranks, with the faults of the moment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .faults import Fault
from .job import Job
from .layout import Ranks
from .noise import Floats, Noise

LINK_CAUSES = ("slow_link", "slow_group", "slow_node_link")


class Links:
    """Links of a job's ranks; each rank's port differs a little from the others' and stays so."""

    def __init__(self, job: Job, noise: Noise) -> None:
        self._job = job
        world = job.layout.world_size
        self._out = noise.factors("ports out", [world], job.link_spread)
        self._in = noise.factors("ports in", [world], job.link_spread)

    def between(self, sources: Ranks, targets: Ranks, faults: Sequence[Fault]) -> tuple[Floats, Floats]:
        """Latency (ns) and ns per byte of ``sources`` -> ``targets``, of any one shape."""
        job, layout = self._job, self._job.layout
        hosts = sources // layout.ranks_per_node, targets // layout.ranks_per_node
        local = hosts[0] == hosts[1]
        latency = np.where(local, job.local_latency_us, job.network_latency_us) * 1e3
        # Gigabytes per second are bytes per nanosecond.
        per_byte = 1 / np.where(local, job.local_gb_per_s, job.network_gb_per_s)
        per_byte = per_byte * self._out[sources] * self._in[targets]
        for fault in faults:
            hit = self._hit(fault, sources, targets, hosts)
            latency = latency + np.where(hit, fault.latency_ms * 1e6, 0.0)
            per_byte = per_byte / np.where(hit, fault.bandwidth, 1.0)
        return latency, per_byte

    def _hit(self, fault: Fault, sources: Ranks, targets: Ranks, hosts: tuple[Ranks, Ranks]) -> np.ndarray:
        if fault.host is not None:
            ends = (hosts[0] == fault.host) | (hosts[1] == fault.host)
            across: np.ndarray = (hosts[0] != hosts[1]) & ends
            return across
        members = fault.culprits(self._job.layout)
        hit: np.ndarray = np.isin(sources, members) & np.isin(targets, members)
        return hit
