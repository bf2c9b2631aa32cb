"""How long a rank may go without an event before it is taken to hang."""

from __future__ import annotations

from .rank_ends import RankEnd

SILENT_NS = 2_000_000_000
"""A rank that wrote nothing for so much longer than the others, no beat of its recorder either, is stopped or
dead."""

IDLE = 0.8
"""Of the time after which one that others wait for may hang: so long it has to have stood still."""

COMPUTES = 0.1
"""Processors in use by a rank that computes; one that stands still for good rather uses none."""

PATIENCE = 5
"""Times its usual pause between events a rank that computes may take."""

CHECKPOINT_PATIENCE = 12
"""Times as long a rank may write its checkpoint while the others wait, and any rank may compute."""

_ALONE = 1.5
"""Times as long a rank may stand still that holds nobody up."""


def idle_or_slow_ns(end: RankEnd, now: int, after: int) -> float:
    """ns without an event that are no sign of a hang in a rank that others wait for, ``after`` ns by now."""
    least = IDLE * after
    if is_silent(end, now) or not end.processors >= COMPUTES:
        return least
    return max(least, min(PATIENCE * end.usual_gap, CHECKPOINT_PATIENCE * after))


def alone_ns(end: RankEnd, now: int, after: int) -> float:
    """The same of a rank for which nobody waits: it has more time, as nobody else tells that it is late."""
    most = CHECKPOINT_PATIENCE * after
    idle = is_silent(end, now) or end.processors < COMPUTES
    # In the first steps it is not known what is usual.
    if not idle or not end.usual_gap or end.inside == "checkpoint":
        return most
    return min(max(_ALONE * after, PATIENCE * end.usual_gap), most)


def is_silent(end: RankEnd, now: int) -> bool:
    """Whether not even its recorder writes any more."""
    return now - end.last_seen > SILENT_NS
