"""A hang in which nobody waits for another rank: a rank alone, or all of them before the same file system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.findings.finding import Finding

from .patience import alone_ns, is_silent
from .rank_ends import RankEnd

_MOST_TOLD = 8
_CONFIDENCE = 0.7
"""Set, not measured. Below what is told at once: the next look has to see it too."""


def find_standstill(
    recording: Mapping[int, RankEnd], places: Mapping[int, Place], now: int, after: int
) -> Finding | None:
    """The hang of ``recording``, the ranks whose recording goes on, if all of them stand still in the middle
    of something that is no communication, or write nothing any more.

    ``now``: ns on the common clock. ``after``: ns from which on one that others wait for may hang.
    """
    for end in recording.values():
        # Between steps nothing is recorded: what is done there is not known. Who is stopped as a whole does
        # not write what it is in, either.
        inside = end.in_step or end.inside is not None or is_silent(end, now)
        if end.recording_off or not inside or now - end.last_event < alone_ns(end, now, after):
            return None
    if not recording:
        return None
    ranks = sorted(recording)
    seconds = (now - max(end.last_event for end in recording.values())) / 1e9
    step = max(end.step for end in recording.values())
    insides = {_inside(end) for end in recording.values()}
    hosts = {places[rank].host for rank in ranks if rank in places}
    evidence = [f"no event of any rank for {seconds:.1f} s, and none of them waits for another"]
    evidence += [_stands(recording[rank], now) for rank in ranks[:_MOST_TOLD]]
    stacks: dict[str, Any] = {}
    for rank in ranks[:_MOST_TOLD]:
        note = recording[rank].note
        if note is not None:
            stacks[str(rank)] = note.get("stacks", {})
    return Finding(
        cause="hang",
        lateness="hang",
        ranks=tuple(ranks),
        group=None,
        host=hosts.pop() or None if len(hosts) == 1 else None,
        first_step=step,
        last_step=step,
        lost_fraction=1.0,
        confidence=_CONFIDENCE,
        evidence=tuple(evidence),
        details={
            "inside": insides.pop() if len(insides) == 1 else "a step",
            "waiting": [],
            "seconds": round(seconds, 1),
            "stacks": stacks,
        },
    )


def _inside(end: RankEnd) -> str:
    return end.inside or "a step"


def _stands(end: RankEnd, now: int) -> str:
    if is_silent(end, now):
        silent = (now - end.last_seen) / 1e9
        return f"rank {end.rank} has written nothing for {silent:.1f} s: it is stopped or dead"
    return f"rank {end.rank} is alive, in {_inside(end)}"
