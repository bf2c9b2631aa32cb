"""Pipeline stages without peers: judged by their own past, and by their layers beside the other stages'.

Whole stages as well: what slows all ranks of one stage alike shows in no comparison inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.change_points import stretches
from mt_megatron.scan.analysis.raised_levels import Raised, beyond_noise, raised_levels
from mt_megatron.scan.analysis.robust import Floats, median_of_rows
from mt_megatron.scan.analysis.step_table import StepTable, beside_peers
from mt_megatron.scan.findings.finding import Cause, Finding

from .causes import HOST_SHARE, why_slow

LEAST_CHANGE = log(1.06)
"""The least change against the own past that counts."""

LEAST_BESIDE = log(1.07)
"""The least difference of layers between stages that counts."""

LEAST_BESIDE_STAGES = log(1.12)
"""The same for whole stages: they are alike only roughly."""

CERTAIN_BESIDE_STAGES = log(1.35)
"""An embedding, or a layer more, may make as much of a difference: below this no cause is named."""

_BASELINE_SHARE = 0.2

QUOTA_OF_ALL = 0.75
"""Trust where all ranks of the run became slower and the counter of a quota accounts for it."""

Beside = Literal["past", "layers", "stages"]


def slow_stages(table: StepTable, blamed: Sequence[Finding]) -> list[Finding]:
    """Findings on whole stages (of one rank or more); steps of ranks already ``blamed`` are left out."""
    own = _log(_without(table, table.columns["compute"], blamed))
    levels = (
        np.stack([median_of_rows(own[rows]) for rows in table.roles]) if table.roles else np.empty((0, 0))
    )
    beside = beside_peers(levels)
    found: list[Finding] = []
    uneven = {rank for each in blamed if each.cause == "uneven_work" for rank in each.ranks}
    for number, rows in enumerate(table.roles):
        if uneven & {table.ranks[row] for row in rows}:
            continue  # what one has more its peers may have less: their past is no measure
        # Alone in the run there is nothing beside it: only its own past.
        relative = beside[number] if len(table.roles) > 1 else levels[number]
        changed = [
            each
            for each in above_past(relative, least=LEAST_CHANGE, tests=levels.size * table.looks)
            if _rises_itself(levels[number], each)
        ]
        for raised in changed:
            found += _each(table, rows, _finding(table, rows, raised, "past"))
        if not changed:
            found += _by_layers(table, number, blamed) or _by_other_stages(table, number, levels)
    # Where every stage changed it is the work that changed.
    stages = {table.places[rank].pp for each in found for rank in each.ranks}
    return found if len(stages) < max(len(table.roles), 2) else []


def above_past(series: Floats, *, least: float, tests: int, floor: float = 0.012) -> list[Raised]:
    """Stretches of ``series`` above its past: above the lowest level that a fifth of the steps have, or less.

    These steps need not follow each other, because a busy minute in between parts a healthy past. Parted,
    they are taken for the past only where at least half as many steps are healthy as are raised; otherwise
    short fast bursts would make everything else slow.
    """
    cut = stretches(series, floor=floor)
    fewest = max(4.0, _BASELINE_SHARE * int(np.isfinite(series).sum()))
    if len(cut) < 2:
        return []
    ordered = sorted(cut, key=lambda each: each.level)
    steps = np.cumsum([each.stop - each.start for each in ordered])
    lasting = [each.level for each in cut if each.stop - each.start >= fewest]
    unbroken = min(lasting, default=np.inf)
    parted = ordered[int(np.argmax(steps >= fewest))].level if steps[-1] >= fewest else np.inf
    for baseline in sorted({parted, unbroken}):
        if not np.isfinite(baseline):
            continue
        found = raised_levels(series - baseline, least=least, tolerated=0.02, floor=floor, tests=10 * tests)
        raised = sum(each.stop - each.start for each in found)
        if baseline == unbroken or 2 * (int(np.isfinite(series).sum()) - raised) >= raised:
            return found
    return []


def _rises_itself(level: Floats, raised: Raised) -> bool:
    """Of two stages that drift apart, the one that became slower."""
    inside = level[raised.start : raised.stop]
    outside = np.concatenate((level[: raised.start], level[raised.stop :]))
    if not np.isfinite(inside).any() or not np.isfinite(outside).any():
        return False
    return float(np.nanmedian(inside) - np.nanmedian(outside)) >= 0.5 * raised.level


def _by_layers(table: StepTable, number: int, blamed: Sequence[Finding]) -> list[Finding]:
    """Slow from the first step on: layers are alike in all stages."""
    layer = _log(_without(table, table.columns["layer"], blamed))
    if len(table.roles) < 3 or not np.isfinite(layer).any():
        return []
    levels = np.stack([median_of_rows(layer[rows]) for rows in table.roles])
    beside = beside_peers(levels)[number]
    tests = 10 * levels.size * table.looks
    raised = raised_levels(beside, least=LEAST_BESIDE, tolerated=0.03, floor=0.015, tests=tests)
    return [_finding(table, table.roles[number], each, "layers") for each in raised]


def _by_other_stages(table: StepTable, number: int, levels: Floats) -> list[Finding]:
    """Slow from the first step on, layers not recorded: beside stages that have as many of them.

    The head may take any time, so that its stage is neither judged nor compared with. Where nothing says who
    has what, as in traces of before, that is the last stage, and all others are taken for alike.
    """
    parts = [table.places[table.ranks[int(rows[0])]] for rows in table.roles]
    heads = [bool(each.has_head) for each in parts]
    if any(each.has_head is None for each in parts):
        heads = [False] * (len(parts) - 1) + [True]
    others = [
        each
        for each, part in enumerate(parts)
        if each != number and not heads[each] and part.layers == parts[number].layers
    ]
    if len(table.roles[number]) > 1 or heads[number] or not others:
        return []
    series = levels[number] - median_of_rows(levels[others])
    raised = raised_levels(
        series, least=LEAST_BESIDE_STAGES, tolerated=0.08, floor=0.015, tests=10 * levels.size * table.looks
    )
    return [_finding(table, table.roles[number], each, "stages") for each in raised]


def _each(table: StepTable, rows: NDArray[np.int64], whole: Finding) -> list[Finding]:
    """Ranks of a stage that are not all of a machine do not share what made them slow: one finding each."""
    ranks = {table.ranks[row] for row in rows}
    hosts = {table.places[rank].host for rank in ranks}
    everybody = {rank for rank in table.ranks if table.places[rank].host in hosts}
    if len(ranks) == 1 or everybody == ranks:
        return [whole]
    return [replace(whole, ranks=(rank,), host=table.host(rank)) for rank in sorted(ranks)]


def _finding(table: StepTable, rows: NDArray[np.int64], raised: Raised, beside: Beside) -> Finding:
    chosen = raised.steps(len(table.iteration))
    ranks = tuple(table.ranks[row] for row in rows)
    first, last = table.steps(raised.start, raised.stop)
    own = float(np.nanmean(table.columns["compute"][rows][:, chosen]))
    lost = own * (1.0 - exp(-raised.level))
    step = float(np.nanmean(table.columns["step"][:, chosen]))
    more = f"{100 * (exp(raised.level) - 1):.1f} %"
    stage = table.places[ranks[0]].pp
    others = [row for row in range(len(table.ranks)) if row not in rows]
    judged = [why_slow(table, int(row), others, chosen, lost) for row in rows]
    causes: list[Cause] = [each.cause for each in judged]
    cause = max(set(causes), key=causes.count)
    why = judged[causes.index(cause)]
    if beside == "past":
        everybody = len(table.roles) == 1 and len(rows) > 1
        whose = "all ranks" if everybody else f"stage {stage}"
        said = f"own work of {whose} takes {more} more than in the steps before or after"
        trust = 0.9 if len(rows) == 1 else 0.75
        if len(table.roles) == 1 and len(rows) > 1:
            # All ranks there are: more likely the work changed. A quota's counter says otherwise.
            quota = cause == "host_contention" and why.shares["throttled"] >= HOST_SHARE
            trust = QUOTA_OF_ALL if quota else 0.4
    elif beside == "layers":
        said = f"a layer of stage {stage} takes {more} longer than the median of the other stages'"
        trust = 0.7
    else:
        said = f"own work of stage {stage} takes {more} more than the median of stages with as many layers"
        trust = 0.6 if raised.level >= CERTAIN_BESIDE_STAGES else 0.48
    hosts = {table.places[rank].host for rank in ranks}
    # The host's facts are those of one rank.
    whom = f"rank {ranks[causes.index(cause)]}: " if len(ranks) > 1 else ""
    return Finding(
        cause=cause,
        lateness="late_arrival",
        ranks=ranks,
        host=hosts.pop() or None if len(hosts) == 1 else None,
        first_step=first,
        last_step=last,
        lost_fraction=min(lost / step, 1.0),
        confidence=round(raised.confidence * why.trust * trust, 3),
        evidence=(f"{said} ({beyond_noise(raised)})", *(f"{whom}{each}" for each in why.evidence)),
        details={"slowdown": round(exp(raised.level) - 1, 4), "shares": why.shares, "stage": stage},
    )


def _without(table: StepTable, values: Floats, blamed: Sequence[Finding]) -> Floats:
    kept: Floats = values.copy()
    for finding in blamed:
        steps = (table.iteration >= finding.first_step) & (table.iteration <= finding.last_step)
        for rank in finding.ranks:
            if rank in table.ranks:
                kept[table.ranks.index(rank), steps] = np.nan
    return kept


def _log(values: Floats) -> Floats:
    return np.log(np.where(values > 0, values, np.nan))
