"""Before a run: how fast each rank computes, copies and writes, each pair exchanges; and who stands out.

Collective. All ranks measure at the same time, as they will work; pairs exchange in rounds in which each
rank has one partner. Who is compared with whom: a rank with all ranks, a pair with the pairs of its kind
(within a node, between nodes).
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .measures import LARGE_BYTES, SMALL_BYTES, Measures, disk_rates
from .outliers import Outlier, outlying_links, outlying_ranks

ALL_PAIRS_UP_TO = 16
"""Ranks up to which every pair is measured; beyond, neighbours at distances 1, 2, 4 ..."""

_REPEATS = 7
_COMPUTE_SECONDS = 0.15
_LARGE = 4 * LARGE_BYTES


@dataclass(frozen=True, kw_only=True)
class Link:
    """One pair of ranks."""

    first: int
    second: int
    seconds: float
    """Of a small message one way: half the median round trip."""

    bytes_per_second: float
    """Of a large message one way."""


@dataclass(frozen=True, kw_only=True)
class Selftest:
    """What was measured, and what stands out."""

    hosts: tuple[str, ...]
    """By rank."""

    device: str
    rates: Mapping[str, tuple[float, ...]]
    """``products`` (FLOP/s), ``copies``, ``disk_write``, ``disk_read`` (bytes/s), by rank."""

    links: tuple[Link, ...]
    outliers: tuple[Outlier, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """In words."""
        ranks, hosts = len(self.hosts), len(set(self.hosts))
        found = [f"{ranks} rank{'s'[: ranks > 1]} on {hosts} host{'s'[: hosts > 1]}, {self.device}"]
        for name, values in self.rates.items():
            unit = "GFLOP/s" if name == "products" else "GB/s"
            low, middle, high = (
                value / 1e9 for value in (min(values), statistics.median(values), max(values))
            )
            spread = f", from {low:,.2f} to {high:,.2f}" if ranks > 1 else ""
            found.append(f"  {name:<11} {middle:10,.2f} {unit}{spread}")
        if self.links:
            delays = [link.seconds * 1e6 for link in self.links]
            speeds = [link.bytes_per_second / 1e9 for link in self.links]
            found.append(
                f"  {len(self.links)} links: {statistics.median(delays):,.0f} us ({min(delays):,.0f} to "
                f"{max(delays):,.0f}), {statistics.median(speeds):,.2f} GB/s ({min(speeds):,.2f} to "
                f"{max(speeds):,.2f})"
            )
        if ranks < 2:
            return [*found, "  one rank: nothing was compared"]
        if not self.links:
            found.append("  no link was measured")
        elif len(self.links) < 3:
            found.append("  too few links to compare them with each other")
        return found + ([f"  stands out: {one.text}" for one in self.outliers] or ["  nothing stands out"])


def rounds_of_pairs(world_size: int) -> list[list[tuple[int, int]]]:
    """Pairs to measure, in rounds in which no rank occurs twice; at most all pairs, each once."""
    if world_size <= ALL_PAIRS_UP_TO:
        return _tournament(world_size)
    rounds = []
    distance = 1
    while distance < world_size:
        for turn in (0, 1):
            pairs = [
                (rank, rank + distance)
                for rank in range(world_size - distance)
                if rank // distance % 2 == turn
            ]
            rounds.append(pairs)
        distance *= 2
    return [pairs for pairs in rounds if pairs]


def _tournament(world_size: int) -> list[list[tuple[int, int]]]:
    # The circle method: one stays, the others move on by one place a round.
    players: list[int | None] = [*range(world_size), *([None] if world_size % 2 else [])]
    half = len(players) // 2
    rounds = []
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        met = [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        rounds.append(sorted(met))
        players = [players[0], players[-1], *players[1:-1]]
    return [pairs for pairs in rounds if pairs]


def selftest(
    backend: Any, *, rank: int, world_size: int, folder: Path, measures: Measures | None = None
) -> Selftest:
    """Measure and compare; collective, in the default process group if there are several ranks.

    ``folder`` is where the disk is tried; ``backend`` a ``mt_megatron.backends.base.Backend``.
    """
    measures = measures or Measures(backend)
    own = _own_rates(measures, folder, alone=world_size == 1)
    names = ("products", "copies", "disk_write", "disk_read")
    device = backend.device_name(backend.current_device())
    if world_size == 1:
        rates: dict[str, tuple[float, ...]] = {name: (value,) for name, value in zip(names, own, strict=True)}
        return Selftest(
            hosts=(socket.gethostname(),),
            device=device,
            rates=rates,
            links=(),
            outliers=(),
        )
    hosts = _hosts(measures)
    every = measures.gather(own)
    rates = {name: tuple(row[place] for row in every) for place, name in enumerate(names)}
    links = _links(measures, rank, world_size)
    outliers = [
        *(one for name in names for one in outlying_ranks(name, rates[name], hosts)),
        *outlying_links([(x.first, x.second, x.seconds, x.bytes_per_second) for x in links], hosts),
    ]
    return Selftest(
        hosts=hosts,
        device=device,
        rates=rates,
        links=links,
        outliers=tuple(outliers),
    )


def _own_rates(measures: Measures, folder: Path, *, alone: bool) -> list[float]:
    measures.products(2)
    count = max(1, round(_COMPUTE_SECONDS / max(measures.products(2) / 2, 1e-6)))
    if not alone:
        count = round(statistics.median(row[0] for row in measures.gather([float(count)])))
    times = []
    for _ in range(_REPEATS):
        if not alone:
            measures.barrier()
        times.append(measures.products(count))
    products = measures.flops_per_product * count / statistics.median(times)
    if not alone:
        measures.barrier()
    copies = measures.copy_bandwidth()
    if not alone:
        measures.barrier()
    written, read = disk_rates(folder)
    return [products, copies, written, read]


def _links(measures: Measures, rank: int, world_size: int) -> tuple[Link, ...]:
    rounds = rounds_of_pairs(world_size)
    own: list[float] = []
    for pairs in rounds:
        measures.barrier()
        mine = next((pair for pair in pairs if rank in pair), None)
        if mine is None:
            own += [0.0, 0.0]
            continue
        peer, leads = (mine[1], True) if rank == mine[0] else (mine[0], False)
        measures.exchange(peer, first=leads, nbytes=SMALL_BYTES, repeats=2)  # makes the connection
        small = measures.exchange(peer, first=leads, nbytes=SMALL_BYTES, repeats=2 * _REPEATS)
        large = measures.exchange(peer, first=leads, nbytes=_LARGE, repeats=_REPEATS)
        own += [statistics.median(small) / 2, statistics.median(large) / 2]
    every = measures.gather(own)
    return tuple(
        Link(
            first=first,
            second=second,
            seconds=every[first][2 * number],
            bytes_per_second=_LARGE / max(every[first][2 * number + 1], 1e-9),
        )
        for number, pairs in enumerate(rounds)
        for first, second in pairs
    )


def _hosts(measures: Measures) -> tuple[str, ...]:
    """The host of every rank, as fixed-size numbers through the same collective as everything else."""
    name = socket.gethostname().encode()[:64].ljust(64, b"\0")
    rows: Sequence[Sequence[float]] = measures.gather([float(byte) for byte in name])
    return tuple(bytes(round(value) for value in row).rstrip(b"\0").decode(errors="replace") for row in rows)
