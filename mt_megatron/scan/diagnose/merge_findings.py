"""Findings that are one matter are told once, and none costs more than the steps grew by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from mt_megatron.scan.analysis.step_table import StepTable
from mt_megatron.scan.findings.finding import Finding, steps_text

FEWEST = 5
"""Steps without the fault that say how long a step takes otherwise."""

_STOPPED = ("host_pause", "host_contention")


def one_per_rank(found: Iterable[Finding]) -> list[Finding]:
    """The same steps of a rank blamed once: stops that its own work or its quota shows are one matter."""
    kept: list[Finding] = []
    for each in found:
        known = [one for one in kept if one.ranks == each.ranks and _overlap(one, each)]
        if each.cause in _STOPPED and any(one.cause in _STOPPED and one.cause != each.cause for one in known):
            continue
        kept.append(each)
    return kept


def merged(found: Iterable[Finding]) -> list[Finding]:
    """The same cause at the same place is one finding, from its first step to its last."""
    kept: dict[tuple[object, ...], list[Finding]] = {}
    for each in found:
        key = (each.cause, each.ranks) if each.cause != "slow_group" else (each.cause, each.ranks, each.group)
        kept.setdefault(key, []).append(each)
    return [_joined(parts) if len(parts) > 1 else parts[0] for parts in kept.values()]


def _joined(parts: Sequence[Finding]) -> Finding:
    """The surest one's words; what they cost together, as a share of all steps from first to last."""
    surest = max(parts, key=lambda each: (each.confidence, each.lost_fraction))
    first, last = min(each.first_step for each in parts), max(each.last_step for each in parts)
    lost = sum(each.lost_fraction * (each.last_step - each.first_step + 1) for each in parts)
    ordered = [surest, *(each for each in parts if each is not surest)]
    # The figures of one stretch do not hold in another: each sentence says of which steps it is.
    several = len({(each.first_step, each.last_step) for each in parts}) > 1
    stretches = sorted({tuple(pair) for each in parts for pair in _stretches(each)})
    evidence = dict.fromkeys(
        f"in {steps_text(each.first_step, each.last_step)}: {said}" if several else said
        for each in ordered
        for said in each.evidence
    )
    return replace(
        surest,
        first_step=first,
        last_step=last,
        lost_fraction=min(lost / (last - first + 1), max(each.lost_fraction for each in parts)),
        evidence=tuple(evidence)[: len(surest.evidence) + 3],
        # A fault that came back is as old as its last return.
        details={
            **surest.details,
            "since": max(_since(each) for each in parts),
            **({"stretches": [list(pair) for pair in stretches]} if len(stretches) > 1 else {}),
        },
    )


def _stretches(finding: Finding) -> list[list[int]]:
    known: list[list[int]] = finding.details.get("stretches") or [[finding.first_step, finding.last_step]]
    return known


def _since(finding: Finding) -> int:
    return int(finding.details.get("since", finding.first_step))


def with_true_cost(found: Iterable[Finding], table: StepTable) -> list[Finding]:
    """What a finding costs is at most what its steps took longer than those without it.

    Own work may take longer where others wait for something else anyway: that costs the run nothing.
    A fault that is there from the first step on has nothing to compare with and keeps its estimate.
    """
    steps = table.columns["step"]
    with np.errstate(all="ignore"):
        length = np.where(np.isfinite(steps).any(axis=0), np.nanmax(np.nan_to_num(steps), axis=0), np.nan)
    return [_costed(each, table, length) for each in found]


def _costed(finding: Finding, table: StepTable, length: np.ndarray) -> Finding:
    inside = (table.iteration >= finding.first_step) & (table.iteration <= finding.last_step)
    within, without = length[inside & np.isfinite(length)], length[~inside & np.isfinite(length)]
    if len(within) < FEWEST or len(without) < FEWEST or finding.cause == "slow_checkpoint":
        return finding
    # Single long steps on either side are somebody else's matter, unless the fault is of that kind itself.
    usual = float(np.median(without))
    now = float(np.mean(within)) if finding.cause in _STOPPED else float(np.median(within))
    grown = max(now - usual, 0.0) / now
    if finding.lost_fraction <= grown:
        return finding
    return replace(
        finding, lost_fraction=grown, details={**finding.details, "own": round(finding.lost_fraction, 4)}
    )


def _overlap(one: Finding, other: Finding) -> bool:
    return one.first_step <= other.last_step and other.first_step <= one.last_step
