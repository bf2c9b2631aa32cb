"""What is wrong with a run: separates late arrival from slow transfer and names who and why.

Own work between communications is compared on each rank's own clock with that of the ranks that do
the same; transfers count from the last arrival on. So lateness that a rank inherits from another is
never its own. Offline (``diagnose``) and while training (``watch``) this is the same code.

Findings that name every rank of a run are statements about the whole run and blame no rank
(``naming_no_rank``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.scan.analysis.matched_ops import RankExchanges
from mt_megatron.scan.analysis.op_table import ExchangeStore
from mt_megatron.scan.analysis.rank_operations import rank_exchanges
from mt_megatron.scan.analysis.step_features import RankSteps, rank_steps
from mt_megatron.scan.analysis.step_table import StepTable, step_table
from mt_megatron.scan.analysis.trace import Place, Trace, clock_error, open_trace
from mt_megatron.scan.clock.fit import Clocks
from mt_megatron.scan.diagnose.hops.side_effects import without_side_effects
from mt_megatron.scan.diagnose.hops.slow_rings import slow_rings
from mt_megatron.scan.diagnose.late_arrival.host_work import slow_on_host, starved_on_host
from mt_megatron.scan.diagnose.late_arrival.own_work import slow_ranks
from mt_megatron.scan.diagnose.late_arrival.passing import without_passing
from mt_megatron.scan.diagnose.late_arrival.quota import short_of_quota
from mt_megatron.scan.diagnose.late_arrival.stages import slow_stages
from mt_megatron.scan.diagnose.late_arrival.waits import pauses, slow_checkpoints, slow_data
from mt_megatron.scan.diagnose.slow_transfer.beside_hosts import placed_beside_hosts
from mt_megatron.scan.diagnose.slow_transfer.links import slow_links
from mt_megatron.scan.diagnose.slow_transfer.slow_units import leaving_out, slow_units
from mt_megatron.scan.diagnose.slow_transfer.starved import beyond_own_waits, beyond_waits, without_starved
from mt_megatron.scan.findings.finding import SURE, Finding
from mt_megatron.scan.format.segments import RankTrace

from .hangs import find_hang
from .merge_findings import merged, one_per_rank, with_true_cost
from .rank_ends import RankEnd, rank_end


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result for one run."""

    findings: tuple[Finding, ...]
    """Surest and costliest first."""

    steps: tuple[int, ...]
    """Iterations that were looked at."""

    ranks: tuple[int, ...]
    missing: tuple[int, ...] = ()
    """Ranks of the run that left nothing."""

    clock: Mapping[str, Any] = field(default_factory=dict)
    """Residuals of the common clock, see ``fit.Clocks.to_dict``."""

    simulated: bool = False
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "findings": [each.to_dict() for each in self.findings]}


class Diagnoser:
    """Collects what the ranks did, in any order, and says what stands out."""

    def __init__(self, places: Mapping[int, Place], clocks: Clocks, *, looks: int = 1) -> None:
        """``looks``: how often the same steps will be judged; more looks need clearer signs."""
        self.clocks = clocks
        """Replace it when clocks are fitted anew; times fed before keep theirs."""

        self._places = dict(places)
        self._looks = looks
        self._parts: list[RankSteps] = []
        self._exchanges = ExchangeStore(self._places, lambda ranks: clock_error(self.clocks, ranks))

    def feed(self, steps: RankSteps, exchanges: RankExchanges) -> None:
        """Add steps of one rank. Those of other ranks have to hold the same steps before ``settle``."""
        self._parts.append(steps)
        self._places.setdefault(steps.rank, Place(rank=steps.rank))
        self._exchanges.add(exchanges)

    def settle(self) -> None:
        """All ranks' parts of the same steps are there: what has no other side now never will."""
        self._exchanges.settle()

    def forget(self, before_step: int) -> None:
        """Drop earlier steps."""
        self._parts = [
            part for part in self._parts if len(part.iteration) and part.iteration[-1] >= before_step
        ]
        self._exchanges.forget(before_step)

    def findings(
        self,
        *,
        first_step: int | None = None,
        last_step: int | None = None,
        without: Sequence[tuple[int, int]] = (),
    ) -> tuple[Finding, ...]:
        """What stands out in the steps fed so far, ``without`` some stretches (first and last step)."""
        table = self.table(first_step, last_step, without)
        if not table.iteration.size or not np.isfinite(table.step_ns):
            return ()
        ranks = [*short_of_quota(table), *slow_on_host(table), *starved_on_host(table), *slow_ranks(table)]
        stood = pauses(table)
        late = one_per_rank([*ranks, *stood])
        late = merged([*late, *slow_stages(table, late)])
        waits = beyond_own_waits([*slow_data(table), *slow_checkpoints(table)], table)
        found = merged([*late, *waits, *self._links(table, late, without)])
        named = naming_no_rank(_ordered(without_passing(with_true_cost(found, table), table)), table.ranks)
        return tuple(without_echoes(named))

    def table(
        self,
        first_step: int | None = None,
        last_step: int | None = None,
        without: Sequence[tuple[int, int]] = (),
    ) -> StepTable:
        """The steps fed so far."""
        return step_table(
            self._parts,
            self._places,
            first_step=first_step,
            last_step=last_step,
            looks=self._looks,
            without=without,
        )

    def _links(
        self, table: StepTable, late: list[Finding], without: Sequence[tuple[int, int]]
    ) -> list[Finding]:
        units = leaving_out(self._exchanges.units(), without)
        slow = slow_units(units, table.iteration, table.step_ns, looks=self._looks)
        labels = self._exchanges.labels.names()
        known = {id(each.unit) for each in slow}
        slow += slow_rings(units, known, table.iteration, table.step_ns, labels, table.places)
        slow = without_side_effects(slow, late)
        slow = placed_beside_hosts(slow, units, table, labels, late)
        slow = beyond_waits(without_starved(slow, units, table, late), table)
        return slow_links(slow, units, table, labels)


def _ordered(found: list[Finding]) -> tuple[Finding, ...]:
    told = [each if each.confidence >= SURE else _unknown(each) for each in found]
    return tuple(sorted(told, key=lambda each: (each.confidence < SURE, -each.lost_fraction, each.ranks)))


def _unknown(finding: Finding) -> Finding:
    details = {**finding.details, "suspected": finding.cause}
    return replace(finding, cause="unknown", details=details)


def read_part(rank: int, recorded: RankTrace, clocks: Clocks) -> tuple[RankSteps, RankExchanges, RankEnd]:
    """What the diagnosis needs of one rank's records."""

    def to_reference(times: Any) -> Any:
        return clocks.to_reference(rank, times)

    return (
        rank_steps(rank, recorded),
        rank_exchanges(rank, recorded, to_reference),
        rank_end(rank, recorded, to_reference),
    )


def diagnose(
    run: Path | str | Trace, *, first_step: int | None = None, last_step: int | None = None
) -> Diagnosis:
    """Diagnose a run from its files (or its opened ``Trace``), one rank in memory at a time.

    ``first_step`` and ``last_step`` (iterations, both included) restrict what is looked at. Raises
    ``ScanError`` when there is no readable trace.
    """
    trace = run if isinstance(run, Trace) else open_trace(run)
    diagnoser = Diagnoser(trace.places, trace.clocks)
    ends: dict[int, RankEnd] = {}
    notes = list(trace.notes)
    # A rank without any readable file is not read below, where files are named otherwise.
    notes += [sentence for sentence, rank in trace.unreadable.items() if rank not in trace.ranks]
    for rank in trace.ranks:
        recorded = trace.rank(rank)
        notes += recorded.damaged
        steps, exchanges, ends[rank] = read_part(rank, recorded, trace.clocks)
        diagnoser.feed(steps, exchanges)
    diagnoser.settle()
    found = diagnoser.findings(first_step=first_step, last_step=last_step)
    table = diagnoser.table(first_step, last_step)
    hang = find_hang(ends, trace.places) if last_step is None else None
    return Diagnosis(
        findings=(hang, *found) if hang is not None else found,
        steps=tuple(int(each) for each in table.iteration),
        ranks=trace.ranks,
        missing=trace.missing,
        clock=trace.clocks.to_dict(),
        simulated=trace.simulated,
        notes=tuple(notes),
    )


LEAST_LOST = 0.005
"""Of the time of its steps: a run that lost less was not slower."""


def naming_no_rank(found: Iterable[Finding], ranks: Collection[int]) -> list[Finding]:
    """``found`` with findings that name all of ``ranks`` (two or more) turned into statements about the run.

    Such a finding keeps its cause, cost and confidence and loses its ranks (``details["whole_run"]``). A
    link or group that is surely slow is a place of its own, even where all ranks are its members, and a
    hang says where each rank stands: both stay.
    """
    everybody = set(ranks)
    return [_of_all(each) if _names_all(each, everybody) else each for each in found]


def without_echoes(found: Iterable[Finding]) -> list[Finding]:
    """``found`` without weak statements about the whole run that say nothing of their own.

    A claim accounts for their steps (a slow rank makes the others' longer too), or they were no longer than
    other steps.
    """
    everything = list(found)
    claims = [each for each in everything if each.is_claim and each.lateness != "hang"]
    return [
        each
        for each in everything
        if each.is_claim
        or not each.whole_run
        or (each.lost_fraction >= LEAST_LOST and not any(_covers(claim, each) for claim in claims))
    ]


def _names_all(finding: Finding, everybody: set[int]) -> bool:
    if len(everybody) < 2 or finding.cause == "hang" or not everybody <= set(finding.ranks):
        return False
    return finding.lateness == "late_arrival" or not finding.is_claim


def _of_all(finding: Finding) -> Finding:
    return replace(finding, ranks=(), details={**finding.details, "whole_run": True})


def _covers(claim: Finding, weak: Finding) -> bool:
    shared = min(claim.last_step, weak.last_step) - max(claim.first_step, weak.first_step) + 1
    return 2 * shared >= weak.last_step - weak.first_step + 1
