"""Findings that name every rank of a run: statements about the whole run, which blame no rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from mt_megatron.scan.findings.finding import Finding

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
