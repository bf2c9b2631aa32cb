"""Each rank's processor: when work ends there, with processes that stand still and quotas that run out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .collectives import Hold
from .faults import Fault
from .job import Job
from .noise import Floats, Noise
from .stops import Quota, Stops
from .ways import Way


class Hosts:
    """The processors of all ranks; ranks by their place [pp, dp, cp, tp]."""

    def __init__(self, job: Job, noise: Noise) -> None:
        self._shape = job.layout.shape
        self._noise = noise
        self._stops: Stops | None = None
        self._quotas: dict[tuple[int, ...], Quota] = {}
        self.busy: Floats = np.zeros(self._shape)
        """Nanoseconds of computing in this step."""

    def begin(
        self, faults: Sequence[Fault], now: Floats, duration: float
    ) -> list[tuple[int, str, float, float]]:
        """A step begins, with these ``faults``, and will last about ``duration`` ns. Returns the stops in it:
        rank, ``stopped``, begin, end."""
        self.busy = np.zeros(self._shape)
        quotas = {}
        stops = []
        for fault in faults:
            where = tuple(int(each) for each in np.unravel_index(fault.rank or 0, self._shape))
            if fault.cause == "host_contention" and fault.mode == "quota":
                quotas[where] = self._quotas.get(where) or Quota(fault.share)
            elif fault.cause == "hang" or (fault.cause == "host_pause" and fault.mode == "stop"):
                stops += self._stop(fault, where, float(now[where]), duration)
        self._quotas = quotas
        return stops

    def throttled(self) -> dict[int, float]:
        """Rank -> nanoseconds that a quota kept from it since its fault began."""
        return {
            int(np.ravel_multi_index(where, self._shape)): quota.throttled
            for where, quota in self._quotas.items()
        }

    def worked(self, begin: Floats, needed: Floats, stages: np.ndarray) -> Floats:
        """When work of ``needed`` ns ends that begins at ``begin``; both [stages, dp, cp, tp]."""
        end = begin + needed
        for where, quota in self._quotas.items():
            for index in np.flatnonzero(stages == where[0]).tolist():
                at = (index, *where[1:])
                if np.isfinite(begin[at]):
                    end[at] = quota.end(float(begin[at]), float(needed[at]))
        self.busy[stages] += needed
        return self.stretched(begin, end, stages)

    def stretched(self, begin: Floats, end: Floats, stages: np.ndarray) -> Floats:
        """``end`` of what would last from ``begin`` to ``end``, later by what its process stood still."""
        if self._stops is None:
            return end
        return self._stops.stretch(begin, end, (self._stops.begin[stages], self._stops.end[stages]))

    def hold(self, stages: np.ndarray | int, way: Way | None = None) -> Hold | None:
        """What moves times of the ranks of ``stages`` out of their stops, in ``way``'s order of arrays."""
        if self._stops is None:
            return None
        begin, end = self._stops.begin[stages], self._stops.end[stages]
        return _holding(self._stops, *((begin, end) if way is None else (way.split(begin), way.split(end))))

    def hold_rows(self, rows: np.ndarray) -> Hold | None:
        """The same of groups of ranks by rows."""
        if self._stops is None:
            return None
        return _holding(self._stops, self._stops.begin.ravel()[rows], self._stops.end.ravel()[rows])

    def _stop(
        self, fault: Fault, where: tuple[int, ...], now: float, duration: float
    ) -> list[tuple[int, str, float, float]]:
        generator = self._noise.generator("stops")
        moment, length, chance = generator.random(), generator.uniform(0.7, 1.3), generator.random()
        if self._stops is None:
            never = np.full(self._shape, np.inf)
            self._stops = Stops(never, never.copy())
        stops, hangs = self._stops, fault.cause == "hang"
        goes_on = np.isfinite(stops.begin[where]) and (np.isinf(stops.end[where]) or stops.end[where] > now)
        if goes_on or (not hangs and chance >= 1 / fault.every):
            return []
        begin = now + moment * duration
        end = np.inf if hangs else begin + fault.seconds * 1e9 * length
        stops.begin[where], stops.end[where] = begin, end
        assert fault.rank is not None
        return [(fault.rank, "stopped", begin, end)]


def _holding(stops: Stops, begin: Floats, end: Floats) -> Hold:
    return lambda times: stops.hold(times, (begin, end))
