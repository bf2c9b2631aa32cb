"""Short disturbances of ranks that compute on their host's processors: over, and cheap, they are no claims.

On a shared machine another process takes a core, or its caches, for some seconds now and then. Such a rank
was slow indeed, and a run of hundreds of steps is healthy all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from mt_megatron.scan.analysis.step_table import StepTable
from mt_megatron.scan.findings.finding import Finding

from .causes import HOST_SHARE

LEAST_COST = 0.01
"""Of the time of all steps looked at."""

STILL_THERE = 4
"""Steps before the last of those looked at in which a disturbance may still go on."""

NEIGHBOURS = 0.35
"""By how much a neighbour on the same caches and sibling threads may slow a rank's work: more is its own."""

TRUST = 0.5
"""Even the surest stays below a claim."""


def without_passing(found: Iterable[Finding], table: StepTable) -> list[Finding]:
    """``found``, with less confidence in disturbances of a host's ranks that are over and cost little."""
    return [_doubted(each) if _passed_by(each, table) else each for each in found]


def _doubted(finding: Finding) -> Finding:
    said = "it was short and is over, and another process on a shared processor may be all that it was"
    return replace(
        finding,
        confidence=round(finding.confidence * TRUST, 3),
        evidence=(*finding.evidence, said),
    )


def _passed_by(finding: Finding, table: StepTable) -> bool:
    if finding.lateness != "late_arrival" or not _of_a_neighbour(finding):
        return False
    rows = [table.ranks.index(rank) for rank in finding.ranks if rank in table.ranks]
    with np.errstate(all="ignore"):
        on_host = bool(rows) and np.nanmax(np.nan_to_num(table.columns["on_host"][rows])) > 0
        length = np.nanmax(np.nan_to_num(table.columns["step"]), axis=0)
    inside = (table.iteration >= finding.first_step) & (table.iteration <= finding.last_step)
    over = int(np.sum(table.iteration > finding.last_step)) > STILL_THERE
    cost = finding.lost_fraction * float(length[inside].sum())
    return bool(on_host and over and cost < LEAST_COST * float(length.sum()))


def _of_a_neighbour(finding: Finding) -> bool:
    if finding.cause == "slow_compute":
        return float(finding.details.get("slowdown", 0.0)) < NEIGHBOURS
    if finding.cause == "host_contention":
        # A quota is the run's own.
        return float(finding.details.get("shares", {}).get("throttled", 0.0)) < HOST_SHARE
    return finding.cause == "host_pause"
