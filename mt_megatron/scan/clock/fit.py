"""One clock for all ranks: every rank's times on the clock of the reference rank, and how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .bindings import (
    Bindings,
    Collectives,
    RankClockData,
    bindings,
)
from .causality import Repair, repair
from .device_anchors import AnchorCheck
from .domains import clock_domains, unix_offset
from .fallback import line_by_collectives
from .offset_lines import OffsetLine, Times, same_clock
from .tree import fit_edges, most_wrong, triangles_beside, ways_home

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
