"""One clock for all ranks: every rank's times on the clock of the reference rank, and how far to trust it.

Domains: ranks of one boot of one machine share a clock, unless their pings contradict. Tree: pings between
pairs of clocks -> one way from each clock to the reference. Without pings: a synchronising collective ends
everywhere at about the same moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .bindings import (
    AnchorCheck,
    Bindings,
    Collectives,
    RankClockData,
    bindings,
)
from .causality import Repair, repair
from .edges import EdgeFit, exchanges, fit_edge
from .offset_lines import OffsetLine, Times, robust_slope, same_clock

Source = Literal["reference", "same clock", "pings", "collectives", "unix time", "none"]


@dataclass(frozen=True, kw_only=True)
class ClockResidual:
    """How well one rank's clock is known. Times in ns, NaN where nothing was measured."""

    rank: int
    source: Source
    """``pings``: fitted. ``same clock``: shares the clock of a rank that is. ``collectives``, ``unix time``:
    no pings, only the ends of collectives, or the wall clocks as they were set. ``none``: taken as is."""

    hops: int = 0
    """Pings between it and the reference rank."""

    pings: int = 0
    drift_ppm: float = 0.0
    """How much faster it runs than the reference's."""

    round_trip_min: float = float("nan")
    residual_median: float = float("nan")
    residual_p99: float = float("nan")
    left_out_p99: float = float("nan")
    uncertainty: float = 0.0
    """Bound of the error at a moment of pings, summed over the hops."""

    triangle: float = float("nan")
    """Largest median disagreement between the fit and pings to a third rank that the fit did not use."""

    corrected: float = 0.0
    """Largest correction that causality asked for."""

    device: AnchorCheck | None = None
    """How the device's times lie on this host's clock; None where nothing was timed there."""


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The result of ``fit_clocks``."""

    reference: int
    """The rank whose clock is everybody's."""

    residuals: Mapping[int, ClockResidual] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What a reader should know: clocks that were only guessed, contradictions."""

    domains: Mapping[int, int] = field(default_factory=dict)
    """Rank -> lowest rank that shares its clock."""

    lines: Mapping[int, OffsetLine] = field(default_factory=dict)
    """Domain -> its line to the reference clock."""

    causality: Repair | None = None
    """What the order of events said about the fit; None where all share one clock."""

    def to_reference(self, rank: int, times: Times) -> Times:
        """``times`` (int64 ns of ``rank``'s clock, any shape) on the reference rank's clock.

        Returns ``times`` itself where both are one clock. A rank that nobody knows is taken as is.
        """
        line = self.lines.get(self.domains.get(rank, rank))
        return times if line is None else line(times)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: NaN becomes None."""
        return {
            "reference": self.reference,
            "ranks": [
                {name: None if value != value else value for name, value in asdict(each).items()}
                for each in self.residuals.values()
            ],
            "notes": list(self.notes),
        }


def fit_clocks(
    ranks: Mapping[int, RankClockData] | Path, *, reference: int | None = None, causality: bool = True
) -> Clocks:
    """Fit every rank's clock to that of ``reference`` (the lowest rank there is by default).

    ``ranks`` are the traces by rank, or a run's folder. Ranks of one machine (equal ``boot_id`` and
    ``clock``) share a clock, unless their pings say otherwise. Pings join the others: the way of the
    lowest round trips leads to the reference, pings beside it check it. Where there are none, the
    ends of collectives say it roughly, and the wall clocks when there are none of those either; both are
    said in ``notes``. Raises ``ScanError`` when a folder holds no trace.

    ``causality``: correct the fit until nothing is received before it was sent and nobody leaves a
    collective before the last has come, and check the device's times. That reads every rank's spans, one
    rank after the other; without it they are read only where pings are missing. On one machine without
    a device nothing of it is needed, or read.
    """
    if isinstance(ranks, Path):
        ranks = _read(ranks)
    if not ranks:
        return Clocks(reference=reference or 0)
    reference = min(ranks) if reference is None else reference
    metas, pings = {rank: each.meta for rank, each in ranks.items()}, _pings(ranks)
    domains, notes = clock_domains(metas, pings)
    home = domains.get(reference, reference)
    fits = fit_edges(pings, domains)
    lines, ways = ways_home(fits, home)
    sources: dict[int, Source] = dict.fromkeys(lines, "pings")
    several = len(set(domains.values())) > 1
    unknown = sorted(set(domains.values()) - set(lines))
    queued = any(meta.get("device_type", "cpu") != "cpu" for meta in metas.values())
    needed = unknown or (causality and (several or queued))
    bound = bindings(ranks, domains) if needed else Bindings()
    for domain in unknown:
        lines[domain], sources[domain] = _without_pings(bound.collectives, metas, domains, domain, home)
        members = [rank for rank, each in domains.items() if each == domain]
        notes.append(
            f"no pings join rank{'s' * (len(members) > 1)} {_few(members)} to rank {reference}: their clock "
            f"is {_GUESSES[sources[domain]]}"
        )
    triangles = triangles_beside(fits, lines, {edge for way in ways.values() for edge in way})
    fixed: Repair | None = None
    if several and causality:
        fixed = repair(
            lines,
            domains,
            bound.collectives,
            bound.transfers,
            home=home,
            trusted={each: most_wrong(fits, ways.get(each)) for each in lines},
        )
        lines = dict(fixed.lines)
        notes.extend(_said(fixed))
    residuals = {}
    for rank in sorted(ranks):
        domain = domains[rank]
        way = [fits[edge] for edge in ways.get(domain, ())]
        residuals[rank] = ClockResidual(
            rank=rank,
            source="reference" if rank == reference else "same clock" if domain == home else sources[domain],
            hops=len(way),
            pings=sum(each.pings for each in way),
            drift_ppm=_drift_ppm(lines[domain]),
            round_trip_min=_worst([each.round_trip_min for each in way]),
            residual_median=_worst([each.residual_median for each in way]),
            residual_p99=_worst([each.residual_p99 for each in way]),
            left_out_p99=_worst([each.left_out_p99 for each in way]),
            uncertainty=sum(each.uncertainty for each in way) if sources[domain] == "pings" else float("nan"),
            triangle=triangles.get(domain, float("nan")),
            corrected=0.0 if fixed is None else fixed.corrected[domain],
            device=bound.anchors.get(rank),
        )
    for rank, each in residuals.items():
        if each.device is not None and not each.device.sound:
            notes.append(
                f"rank {rank}: {each.device.early} of {each.device.spans} spans begin on the device before "
                f"the host began them, by up to {each.device.worst / 1e3:.0f} us: its device times are "
                "anchored wrongly"
            )
    return Clocks(
        reference=reference,
        residuals=residuals,
        notes=tuple(notes),
        domains=domains,
        lines=lines,
        causality=fixed,
    )


_GUESSES: Mapping[Source, str] = {
    "collectives": "put right by the ends of collectives (tens of microseconds wrong, or more)",
    "unix time": "put right by the wall clocks as they were set (milliseconds wrong, or more)",
    "none": "taken as it is",
}


def _read(run: Path) -> dict[int, RankClockData]:
    # Not at the top: whoever has the traces already needs no files.
    from mt_megatron.scan.format.run_files import existing_run
    from mt_megatron.scan.format.segments import read_rank

    files = existing_run(run)
    return {rank: read_rank(files.rank_folder(rank)) for rank in files.ranks()}


def _pings(ranks: Mapping[int, RankClockData]) -> dict[int, np.ndarray]:
    return {rank: np.asarray(each.pings) for rank, each in ranks.items() if len(each.pings)}


def _without_pings(
    collectives: Sequence[Collectives],
    metas: Mapping[int, Mapping[str, Any]],
    domains: Mapping[int, int],
    domain: int,
    home: int,
) -> tuple[OffsetLine, Source]:
    own = frozenset(rank for rank, each in domains.items() if each == domain)
    others = frozenset(rank for rank, each in domains.items() if each == home)
    line = line_by_collectives(collectives, own, others)
    if line is not None:
        return line, "collectives"
    theirs, ours = (
        next((offset for rank in sorted(members) if (offset := unix_offset(metas[rank])) is not None), None)
        for members in (own, others)
    )
    if theirs is None or ours is None:
        return same_clock(), "none"
    return OffsetLine(knots=np.zeros(1, np.int64), base=theirs - ours, delta=np.zeros(1)), "unix time"


def _said(fixed: Repair) -> list[str]:
    found = []
    if fixed.mismatched:
        found.append(
            f"{fixed.mismatched} of {fixed.pairs} pairs of events contradict the clocks by more than these "
            "can be wrong: they were not matched rightly, or a clock was set"
        )
    if fixed.left:
        found.append(f"{fixed.left} of {fixed.pairs} pairs of events still have the effect before its cause")
    return found


def _drift_ppm(line: OffsetLine) -> float:
    if len(line.knots) < 2:
        return 0.0 - line.slope_after * 1e6
    return 0.0 - float((line.delta[-1] - line.delta[0]) / (line.knots[-1] - line.knots[0]) * 1e6)


def _worst(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return max(known) if known else float("nan")


def _few(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


_CONTRADICTING = 0.05


def clock_domains(
    metas: Mapping[int, Mapping[str, Any]], pings: Mapping[int, np.ndarray]
) -> tuple[dict[int, int], list[str]]:
    """Rank -> the lowest rank with the same clock, and what is odd about it.

    ``metas`` are the first notes of the ranks' traces (``boot_id``, ``clock``), ``pings`` their ``PING``
    records. A rank that does not say its ``boot_id`` has a clock of its own. Two ranks share none if more
    than one in twenty of the exchanges between them excludes it (an answer from before its question).
    """
    first: dict[tuple[object, object], int] = {}
    found: dict[int, int] = {}
    notes: list[str] = []
    for rank in sorted(metas):
        boot = metas[rank].get("boot_id")
        key = (boot or f"rank {rank}", metas[rank].get("clock"))
        domain = first.setdefault(key, rank)
        if domain != rank and (
            _contradict(rank, domain, found, pings) or _differ(pings.get(rank), pings.get(domain))
        ):
            notes.append(
                f"ranks {domain} and {rank} say they run on one machine and their pings exclude that they "
                f"share a clock: rank {rank} gets its own (is it in another time namespace?)"
            )
            domain = rank
        found[rank] = domain
    return found, notes


def _contradict(rank: int, domain: int, domains: Mapping[int, int], pings: Mapping[int, np.ndarray]) -> bool:
    peers = {other for other, each in domains.items() if each == domain}
    impossible = total = 0
    own = pings.get(rank)
    if own is not None:
        impossible, total = _excluded(own[np.isin(own["peer"], list(peers))])
    for peer in peers & pings.keys():
        more, of = _excluded(pings[peer][pings[peer]["peer"] == rank])
        impossible, total = impossible + more, total + of
    return impossible > _CONTRADICTING * total


def _differ(own: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether pings to the same third rank exclude that two ranks have one clock."""
    if own is None or other is None:
        return False
    outside = total = 0
    for peer in np.intersect1d(own["peer"], other["peer"]).tolist():
        fit = fit_edge(exchanges([other[other["peer"] == peer]], []))
        found = exchanges([own[own["peer"] == peer]], [])
        if fit is None or not len(found.at):
            continue
        expected = fit.line(found.at) - found.at
        spare = fit.round_trip_median
        outside += int(((expected < found.low - spare) | (expected > found.high + spare)).sum())
        total += len(found.at)
    return outside > _CONTRADICTING * total


def _excluded(pings: np.ndarray) -> tuple[int, int]:
    early = (pings["received"] < pings["sent"]) | (pings["returned"] < pings["answered"])
    return int(early.sum()), len(pings)


def unix_offset(meta: Mapping[str, Any]) -> int | None:
    """Wall clock minus this rank's clock in ns, from the pair of times in a trace's first note; None when
    it has none."""
    monotonic, unix = meta.get("monotonic_ns"), meta.get("unix_ns")
    if isinstance(monotonic, int) and isinstance(unix, int):
        return unix - monotonic
    return None


_PER_KNOT = 50
_FEWEST = 5


def line_by_collectives(
    matched: Sequence[Collectives], own: frozenset[int], others: frozenset[int]
) -> OffsetLine | None:
    """From the clock of the ranks ``own`` to that of the ranks ``others``, by the medians of the
    differences between their ends of the same collectives; None with fewer than five of those.

    Wrong by what one end usually lags behind the other: tens of microseconds over loopback, more where
    links differ. Seen on one machine between processes: median 79 us, 95th percentile 202 us.
    """
    at, difference = [], []
    for each in matched:
        mine = [index for index, rank in enumerate(each.ranks) if rank in own]
        theirs = [index for index, rank in enumerate(each.ranks) if rank in others]
        if mine and theirs:
            at.append(each.ends[mine[0]])
            difference.append(each.ends[theirs[0]] - each.ends[mine[0]])
    if sum(len(each) for each in at) < _FEWEST:
        return None
    times, offsets = np.concatenate(at), np.concatenate(difference)
    order = np.argsort(times, kind="stable")
    times, offsets = times[order], offsets[order]
    base, start = int(np.median(offsets)), int(times[0])
    x, rest = (times - start).astype(np.float64), (offsets - base).astype(np.float64)
    slope = robust_slope(x, rest) if x[-1] > 1e9 else 0.0
    rest -= slope * x
    parts = np.array_split(np.arange(len(x)), max(len(x) // _PER_KNOT, 1))
    knots = np.array([np.median(x[part]) for part in parts])
    delta = np.array([np.median(rest[part]) for part in parts]) + slope * knots
    knots, first = np.unique(np.rint(knots).astype(np.int64), return_index=True)
    return OffsetLine(
        knots=start + knots, base=base, delta=delta[first], slope_before=slope, slope_after=slope
    )


_SPARE_NS = 200_000.0

Edge = tuple[int, int]
"""Two domains, the lower first."""


def fit_edges(pings: Mapping[int, np.ndarray], domains: Mapping[int, int]) -> dict[Edge, EdgeFit]:
    """The line from the lower to the higher domain for every two that exchanged pings."""
    asked: dict[Edge, list[np.ndarray]] = {}
    answered: dict[Edge, list[np.ndarray]] = {}
    for rank, rows in pings.items():
        for peer in np.unique(rows["peer"]).tolist():
            if peer not in domains or domains[peer] == domains[rank]:
                continue
            own, other = domains[rank], domains[peer]
            edge, ways = ((own, other), asked) if own < other else ((other, own), answered)
            ways.setdefault(edge, []).append(rows[rows["peer"] == peer])
    found = {}
    for edge in sorted({*asked, *answered}):
        fit = fit_edge(exchanges(asked.get(edge, []), answered.get(edge, [])))
        if fit is not None:
            found[edge] = fit
    return found


def ways_home(
    fits: Mapping[Edge, EdgeFit], home: int
) -> tuple[dict[int, OffsetLine], dict[int, tuple[Edge, ...]]]:
    """Lines to ``home`` along the ways of least uncertainty (Dijkstra), and the ways."""
    lines = {home: same_clock()}
    ways: dict[int, tuple[Edge, ...]] = {home: ()}
    costs = {home: 0.0}
    while True:
        # Few domains: the next one is looked for among all edges.
        candidates = []
        for (low, high), fit in fits.items():
            for near, far in ((low, high), (high, low)):
                if near in lines and far not in lines:
                    candidates.append((costs[near] + fit.uncertainty, far, near, (low, high)))
        if not candidates:
            return lines, ways
        cost, far, near, edge = min(candidates)
        towards = fits[edge].line if edge == (far, near) else fits[edge].line.inverse()
        lines[far] = towards.then(lines[near])
        ways[far] = (*ways[near], edge)
        costs[far] = cost


def triangles_beside(
    fits: Mapping[Edge, EdgeFit], lines: Mapping[int, OffsetLine], used: set[Edge]
) -> dict[int, float]:
    """Per domain, how far pings beside the tree are from what the tree says; ns."""
    found: dict[int, float] = {}
    for (low, high), fit in fits.items():
        if (low, high) in used or low not in lines or high not in lines:
            continue
        at = fit.line.knots
        difference = np.abs(lines[high](fit.line(at)) - lines[low](at))
        disagreement = float(np.median(difference))
        for domain in (low, high):
            found[domain] = max(found.get(domain, 0.0), disagreement)
    return found


def most_wrong(fits: Mapping[Edge, EdgeFit], way: tuple[Edge, ...] | None) -> float:
    """ns by which a line can be wrong; infinite where nothing was measured."""
    if way is None:
        return float("inf")
    between = [fits[edge].left_out_p99 for edge in way]
    return (
        4 * sum(fits[edge].uncertainty for edge in way)
        + 4 * sum(each for each in between if each == each)
        + _SPARE_NS * len(way)
    )
