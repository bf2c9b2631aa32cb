"""Ranks whose own work takes longer than that of the ranks that do the same in the same step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.raised_levels import Raised, beyond_noise, raised_levels
from mt_megatron.scan.analysis.robust import Floats
from mt_megatron.scan.analysis.step_table import StepTable, beside_peers
from mt_megatron.scan.findings.finding import Finding

from .causes import why_slow
from .late_finding import late_arrival

LEAST = log(1.055)
"""Less than this is nobody's fault: processors differ."""

LEAST_BESIDE = {1: log(1.065), 2: log(1.06)}
"""The same beside one or two others, whose own difference counts for more."""

WORK = ("work", "expert_work")
"""Columns that say how much a rank has to do."""

TOLERATED = log(1.02)
FLOOR = 0.01
"""Least standard deviation of one step's own work that is believed."""

_ROUNDS = 6


@dataclass(frozen=True, kw_only=True)
class _Suspect:
    row: int
    raised: Raised
    by_work: float | None
    """What its greater amount of work explains (logarithm), if that is most of it."""


def slow_ranks(table: StepTable) -> list[Finding]:
    """Findings on single ranks, compared with the others of their pipeline stage."""
    found = []
    for rows in table.roles:
        if len(rows) >= 2:
            for suspect in _suspects(table, rows):
                finding = _finding(table, rows, suspect)
                # Beside those that have less to do the usual amount is no fault.
                if finding.cause != "uneven_work" or finding.details["more_work"] >= TOLERATED:
                    found.append(finding)
    return _by_replica(table, found)


def _by_replica(table: StepTable, found: list[Finding]) -> list[Finding]:
    """More tokens for one replica are one matter, though all of its ranks have more to do."""
    kept = [each for each in found if each.cause != "uneven_work" or each.details.get("of") != "work"]
    replicas: dict[int, list[Finding]] = {}
    for each in found:
        if each.cause == "uneven_work" and each.details.get("of") == "work":
            replicas.setdefault(table.places[each.ranks[0]].dp, []).append(each)
    for members in replicas.values():
        worst = max(members, key=lambda each: each.lost_fraction)
        ranks = tuple(sorted({rank for each in members for rank in each.ranks} | _alike(table, worst)))
        if len(ranks) == 1:
            kept += members
            continue
        hosts = {table.host(rank) for rank in ranks}
        kept.append(
            replace(
                worst,
                ranks=ranks,
                host=hosts.pop() if len(hosts) == 1 else None,
                first_step=min(each.first_step for each in members),
                last_step=max(each.last_step for each in members),
                evidence=(*worst.evidence, f"the same holds for all of ranks {list(ranks)}, one replica"),
            )
        )
    return kept


def _alike(table: StepTable, worst: Finding) -> set[int]:
    """The ranks of its replica that have as much more to do, whatever else hides it in their own work."""
    if worst.details.get("of") != "work":
        return set()
    chosen = (table.iteration >= worst.first_step) & (table.iteration <= worst.last_step)
    work = beside_peers(_log(table.columns["work"]))
    row = table.ranks.index(worst.ranks[0])
    least = 0.5 * float(np.nanmedian(work[row, chosen]))
    replica = table.places[worst.ranks[0]].dp
    return {
        rank
        for at, rank in enumerate(table.ranks)
        if table.places[rank].dp == replica and np.nanmedian(work[at, chosen]) >= least > 0
    }


def _suspects(table: StepTable, rows: NDArray[np.int64]) -> list[_Suspect]:
    """Those found first are not compared with any more, so that several at once do not hide each other."""
    own = _log(table.columns["compute"][rows])
    work = [_log(_at_least_one(table.columns[name][rows])) for name in WORK]
    peers = own.copy()
    suspects: list[_Suspect] = []
    tests = int(np.isfinite(table.columns["compute"]).sum()) * table.looks
    shares = [_share_of_work(beside_peers(own), beside_peers(each)) for each in work]
    for _ in range(_ROUNDS):
        new = [
            suspect
            for suspect in _one_round(own, peers, work, shares, tests)
            if not any(_same(suspect, known) for known in suspects)
        ]
        if not new:
            break
        for suspect in new:
            peers[suspect.row, suspect.raised.start : suspect.raised.stop] = np.nan
        suspects += new
    return suspects


def _one_round(
    own: Floats, peers: Floats, work: list[Floats], shares: list[float | None], tests: int
) -> Iterator[_Suspect]:
    difference = beside_peers(own, peers)
    more_work = [beside_peers(each, np.where(np.isnan(peers), np.nan, each)) for each in work]
    least = LEAST_BESIDE.get(len(own) - 1, LEAST)
    for row in range(len(own)):
        explained = np.zeros(own.shape[1])
        for each, share in zip(more_work, shares, strict=True):
            explained += _explained(difference[row] - explained, each[row], share)
        rest = difference[row] - explained
        for raised in raised_levels(rest, least=least, tolerated=TOLERATED, floor=FLOOR, tests=tests):
            yield _Suspect(row=row, raised=raised, by_work=None)
        if not np.any(explained > TOLERATED):
            continue
        for raised in raised_levels(
            difference[row], least=least, tolerated=TOLERATED, floor=FLOOR, tests=tests
        ):
            by_work = float(np.nanmedian(explained[raised.start : raised.stop]))
            if by_work >= 0.5 * raised.level and by_work >= TOLERATED:
                yield _Suspect(row=row, raised=raised, by_work=by_work)


def _same(one: _Suspect, other: _Suspect) -> bool:
    overlap = min(one.raised.stop, other.raised.stop) - max(one.raised.start, other.raised.start)
    return one.row == other.row and (one.by_work is None) == (other.by_work is None) and overlap > 0


def _at_least_one(work: Floats) -> Floats:
    """``work`` [ranks, steps]: who said how much it had in other steps and says none has next to nothing."""
    says = np.nansum(work, axis=1) > 0
    found: Floats = np.where((work == 0) & says[:, None], 1.0, work)
    return found


def _log(values: Floats) -> Floats:
    return np.log(np.where(values > 0, values, np.nan))


def _share_of_work(difference: Floats, more_work: Floats) -> float | None:
    """How much of a difference in work shows in own time (elasticity), from its changes over the steps.

    None where the amounts of work never change: then up to all of it may.
    """
    x = more_work - _row_median(more_work)
    y = difference - _row_median(difference)
    clear = np.isfinite(x) & np.isfinite(y) & (np.abs(x) >= 0.03)
    if clear.sum() < 8:
        return None
    x, y = x[clear], y[clear]
    order = np.argsort(y / x)
    # The weighted median of the slopes: what happened for another reason does not bend it.
    weight = np.cumsum(np.abs(x[order]))
    return float(np.clip((y / x)[order][int(np.searchsorted(weight, weight[-1] / 2))], 0.0, 1.0))


def _row_median(values: Floats) -> Floats:
    with np.errstate(all="ignore"):
        found = [np.median(row[np.isfinite(row)]) if np.isfinite(row).any() else np.nan for row in values]
    return np.array(found)[:, None]


def _explained(difference: Floats, more_work: Floats, share: float | None) -> Floats:
    """Of ``difference`` [steps], what the amount of work explains."""
    known = np.nan_to_num(more_work)
    if share is not None:
        return share * known
    # Never changed: whatever fits between nothing and all of it. Of less work nothing is expected.
    return np.clip(np.nan_to_num(difference), 0.0, np.maximum(known, 0.0))


def _finding(table: StepTable, rows: NDArray[np.int64], suspect: _Suspect) -> Finding:
    row = int(rows[suspect.row])
    rank = table.ranks[row]
    raised = suspect.raised
    chosen = raised.steps(len(table.iteration))
    others = [int(each) for each in rows if each != row]
    compute = table.columns["compute"]
    own = float(np.nanmean(compute[row, chosen]))
    lost = own * (1.0 - exp(-raised.level))
    step = float(np.nanmean(table.columns["step"][:, chosen]))
    evidence = [
        f"own work of rank {rank} takes {own / 1e6:.1f} ms a step, {100 * (exp(raised.level) - 1):.1f} %"
        f" more than the median of the {len(others)} other rank{'s' * (len(others) > 1)} of its stage "
        f"({beyond_noise(raised)})"
    ]
    evidence += _phases(table, row, others, chosen)
    details = {"slowdown": round(exp(raised.level) - 1, 4), "certainty": round(raised.certainty, 2)}
    if suspect.by_work is not None:
        more, name = max((_more_work(table, row, others, chosen, name), name) for name in WORK)
        what = "tokens" if name == "work" else "rows for its experts"
        evidence.append(f"it has {100 * (exp(more) - 1):.0f} % more {what}, which explains most of it")
        return late_arrival(
            table,
            row,
            raised.start,
            raised.stop,
            cause="uneven_work",
            lost_fraction=lost / step,
            confidence=raised.confidence,
            evidence=evidence,
            details={**details, "more_work": round(exp(more) - 1, 4), "of": name},
        )
    why = why_slow(table, row, others, chosen, lost)
    return late_arrival(
        table,
        row,
        raised.start,
        raised.stop,
        cause=why.cause,
        lost_fraction=lost / step,
        confidence=raised.confidence * why.trust,
        evidence=(*evidence, *why.evidence),
        details={**details, "shares": why.shares},
    )


def _more_work(table: StepTable, row: int, others: list[int], chosen: NDArray[np.bool_], name: str) -> float:
    """The logarithm of how many times the others' work it has; 0 where nobody said."""
    own, theirs = _log(table.columns[name][row, chosen]), _log(table.columns[name][others][:, chosen])
    if not np.isfinite(own).any() or not np.isfinite(theirs).any():
        return 0.0
    return float(np.nanmedian(own) - np.nanmedian(theirs))


def _phases(table: StepTable, row: int, others: list[int], chosen: NDArray[np.bool_]) -> list[str]:
    """By how much each phase differs: a slow processor slows all of them alike."""
    said = []
    for name in ("forward", "backward", "optimizer"):
        values = table.columns[name]
        own, theirs = values[row, chosen], values[others][:, chosen]
        if np.isfinite(own).any() and np.isfinite(theirs).any() and np.nanmedian(theirs) > 0:
            more = float(np.nanmedian(own) / np.nanmedian(theirs)) - 1.0
            said.append(f"{name} {100 * more:+.0f} %")
    return ["by phase: " + ", ".join(said)] if said else []
