"""Clocks that are set differently and drift, one per machine, and pings between them over a noisy network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.clock.pings import ping_plan
from mt_megatron.scan.format.records import PING

from .layout import Layout
from .noise import Floats, Noise

_FIRST_PAUSE, _LONGEST_PAUSE = 2e9, 180e9
_PER_ROUND, _PER_CHECK = 64, 16
_UPTIME = 1_000_000_000_000


@dataclass(frozen=True)
class Wander:
    """How far clocks are spread at the start, and how they run. Offsets in ns, drifts as parts of 1."""

    offset: float = 1e9
    drift: float = 50e-6
    slow_drift: float = 0.5e-6
    """Amplitude of the part that changes with the room's temperature."""

    period: float = 600e9


class ClockSet:
    """What each machine's clock shows at a true time (ns from the start of the simulation)."""

    def __init__(self, layout: Layout, noise: Noise, wander: Wander) -> None:
        generator = noise.generator("clocks")
        self._wander = wander
        self.offset = generator.uniform(-wander.offset, wander.offset, layout.hosts)
        self.drift = generator.uniform(-wander.drift, wander.drift, layout.hosts)
        self._phase = generator.uniform(0, 2 * np.pi, layout.hosts)

    def shown(self, host: int | NDArray[np.int64], times: Floats) -> NDArray[np.int64]:
        """Nanoseconds that the clock of ``host`` shows at ``times``; both broadcast."""
        return np.rint(times + self._ahead(host, times)).astype(np.int64) + _UPTIME

    def line(self, host: NDArray[np.int64], begin: float, end: float) -> tuple[Floats, Floats]:
        """Slope and value at 0 of what ``host`` is ahead by, between two times so near that it is a line."""
        ahead = self._ahead(host, np.float64(begin)), self._ahead(host, np.float64(end))
        slope = (ahead[1] - ahead[0]) / max(end - begin, 1.0)
        return slope, ahead[0] - slope * begin

    def _ahead(self, host: int | NDArray[np.int64], times: Floats | np.float64) -> Floats:
        wander = self._wander
        turn = 2 * np.pi / wander.period
        slow = np.cos(self._phase[host]) - np.cos(turn * times + self._phase[host])
        ahead: Floats = self.offset[host] + self.drift[host] * times + wander.slow_drift / turn * slow
        return ahead


def uptime() -> int:
    """What a clock without offset shows when the simulation begins, ns."""
    return _UPTIME


class Pings:
    """The exchanges of four timestamps that the ranks of a run record, by the plan of real runs."""

    def __init__(self, layout: Layout, noise: Noise, clocks: ClockSet) -> None:
        self._layout, self._noise, self._clocks = layout, noise, clocks
        names = [layout.host_name(layout.host_of(rank)) for rank in range(layout.world_size)]
        plan = ping_plan(names)
        self._asks, self._checks_only = plan.asks, plan.same_machine
        self._next = 0.0
        self._pause = _FIRST_PAUSE

    def until(self, now: float, *, last: bool = False) -> dict[int, NDArray[np.void]]:
        """Rank -> the ``PING`` records of the rounds that were due before ``now``; of a last one with
        ``last``."""
        made: dict[int, list[NDArray[np.void]]] = {}
        due = []
        first = self._next == 0.0
        while self._next <= now:
            due.append(self._next)
            self._next += self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if last and np.isfinite(now):
            due.append(now)
        for index, moment in enumerate(due):
            ends = (first and index == 0) or (last and index == len(due) - 1)
            for rank, peers in self._asks.items():
                if rank in self._checks_only and not ends:
                    continue
                for order, peer in enumerate(peers):
                    count = _PER_CHECK if order or rank in self._checks_only else _PER_ROUND
                    made.setdefault(rank, []).append(
                        self._exchanges(rank, peer, moment + order * 50e6, count)
                    )
        return {rank: np.concatenate(arrays) for rank, arrays in made.items()}

    def _exchanges(self, rank: int, peer: int, moment: float, count: int) -> NDArray[np.void]:
        generator = self._noise.generator("pings")
        hosts = self._layout.host_of(rank), self._layout.host_of(peer)
        wire = 6e3 if hosts[0] == hosts[1] else 25e3
        # The wire, queues and two wake-ups; now and then a thread does not run for milliseconds.
        ways = wire + generator.exponential(12e3, (2, count)) + 8e3 * generator.pareto(1.5, (2, count))
        ways[0] *= 1 + generator.normal(0, 0.02)
        turn = 8e3 + generator.exponential(6e3, count)
        sent = moment + np.cumsum(3e5 + generator.exponential(2e5, count))
        received = sent + ways[0]
        answered = received + turn
        made = np.zeros(count, PING)
        made["sent"] = self._clocks.shown(hosts[0], sent)
        made["received"] = self._clocks.shown(hosts[1], received)
        made["answered"] = self._clocks.shown(hosts[1], answered)
        made["returned"] = self._clocks.shown(hosts[0], answered + ways[1])
        made["peer"] = peer
        return made
