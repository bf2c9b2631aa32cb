"""Who keeps everybody waiting when nothing ends: the rank that has not entered what the others wait in.

Where that may be a rank of which there are no records (no files, or its tracing failed), nobody is named.

Patience: the time that a rank may go without an event before it is taken to hang. Standstill: a hang in which
no rank waits for another: one rank alone, or all of them before the same file system.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.findings.finding import Finding

from .rank_ends import OpenOperation, RankEnd

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


AFTER_NS = 5_000_000_000
"""An operation open for longer than this may hang."""

_MOST_BLIND = 8

_BLIND_CONFIDENCE = 0.5
"""That something hangs is seen; who, not."""


def find_hang(
    ends: Mapping[int, RankEnd], places: Mapping[int, Place], *, now: int | None = None, after: int = AFTER_NS
) -> Finding | None:
    """The hang at the end of the traces, if there is one; its ``ranks`` are empty where the rank that is
    waited for may be one without records.

    ``now``: ns on the common clock, while the run trains; without it the traces end where they end, and the
    last thing that any rank wrote is taken.
    """
    # What was open when a recording ended says nothing about the time after.
    recording = {rank: end for rank, end in ends.items() if end.ended is None}
    if not recording:
        return None
    latest = max(end.last_seen for end in recording.values())
    training = now is not None
    now = latest if now is None else now
    # Who has stood still for long enough to be blamed has waited for long enough to be excused.
    stalled = {
        rank: end.waiting
        for rank, end in recording.items()
        if end.waiting is not None and now - end.waiting.begin >= IDLE * after
    }
    if all(now - waiting.begin < after for waiting in stalled.values()):
        return find_standstill(recording, places, now, after)
    silent = {rank for rank, end in recording.items() if latest - end.last_seen > SILENT_NS}
    misses = {
        rank: set().union(*(_missing(rank, each, ends, silent) for each in (waiting, *ends[rank].beside)))
        for rank, waiting in stalled.items()
    }
    missed: set[int] = set().union(*misses.values())
    blind = {rank for rank in missed if rank not in ends or ends[rank].unrecorded}
    absent = missed - blind
    # Who waits in turn for somebody else is not at fault.
    culprits = sorted(rank for rank in absent if not misses.get(rank))
    what = ""
    if not culprits and blind:
        first = min(waiting.begin for rank, waiting in stalled.items() if misses[rank] & blind)
        # What it does, a checkpoint perhaps, cannot be seen: while there is time, longer is waited.
        if training and now - first < CHECKPOINT_PATIENCE * after:
            return None
        what = "who is at fault cannot be told from the records of the others"
    elif not culprits and absent:
        culprits = sorted(absent)
        what = "they wait for each other in different operations"
    elif not culprits:
        begun = min(stalled.values(), key=lambda each: each.begin)
        if now - max(_entered(begun, end) for end in recording.values()) < after:
            return None  # the last one has only just come
        culprits = sorted(begun.key[1]) or sorted(stalled)
        what = "all members have entered it and it does not end: the network, or a member that died in it"
    return _finding(culprits, sorted(blind), stalled, misses, ends, places, now, after, what)


def _entered(operation: OpenOperation, end: RankEnd) -> int:
    same = end.waiting is not None and (end.waiting.key, end.waiting.seq) == (operation.key, operation.seq)
    return end.waiting.begin if same and end.waiting is not None else operation.begin


def _missing(
    rank: int, waiting: OpenOperation, ends: Mapping[int, RankEnd], silent: Collection[int]
) -> set[int]:
    """Members that have not entered the operation that ``rank`` waits in, or went ``silent`` in it, or of
    which nothing is known."""
    # Of two that are silent neither is known to wait for the other.
    found = set(waiting.key[1]) & set(silent) - {rank} if rank not in silent else set()
    for member in waiting.key[1]:
        if member == rank:
            continue
        end = ends.get(member)
        unknown = end is None or end.unrecorded
        if unknown or (waiting.seq >= 0 and ends[member].reached.get(waiting.key, -1) < waiting.seq):
            found.add(member)
    return found


def _finding(
    culprits: list[int],
    blind: list[int],
    stalled: Mapping[int, OpenOperation],
    misses: Mapping[int, set[int]],
    ends: Mapping[int, RankEnd],
    places: Mapping[int, Place],
    now: int,
    after: int,
    what: str,
) -> Finding | None:
    concerned = [rank for rank in stalled if misses[rank] & set(culprits or blind)] or list(stalled)
    witness = min(concerned, key=lambda rank: stalled[rank].begin)
    waiting = stalled[witness]
    seconds = (now - waiting.begin) / 1e9
    evidence = [
        f"rank {witness} and {len(stalled) - 1} other rank{'s' * (len(stalled) != 2)} have waited up to "
        f"{seconds:.1f} s in {waiting.op} number {waiting.seq} of {_words(waiting)}"
    ]
    evidence += [_unknown(rank, ends.get(rank)) for rank in blind[:_MOST_BLIND]]
    if what:
        evidence.append(what)
    stacks: dict[str, Any] = {}
    for rank in culprits[:8]:
        end = ends[rank]
        if end.inside == "checkpoint" and now - waiting.begin < CHECKPOINT_PATIENCE * after:
            return None
        if not what and now - end.last_event < idle_or_slow_ns(end, now, after):
            return None  # slow, and getting on
        silent = (now - end.last_seen) / 1e9
        if end.ended is not None:
            evidence.append(f"rank {rank} has left without entering it: {end.ended.words()}")
        elif silent > 2.0:
            evidence.append(f"rank {rank} has written nothing for {silent:.1f} s: it is stopped or dead")
        elif end.inside is not None:
            evidence.append(f"rank {rank} is alive, in {end.inside}")
        elif not what:
            evidence.append(f"rank {rank} is alive and has not entered it")
        if end.note is not None:
            stacks[str(rank)] = end.note.get("stacks", {})
    sure = 0.95 if not what else 0.7 if culprits else _BLIND_CONFIDENCE
    hosts = {places[rank].host for rank in culprits if rank in places}
    return Finding(
        cause="hang",
        lateness="hang",
        ranks=tuple(culprits),
        group="pp" if waiting.is_transfer else waiting.key[0],
        host=hosts.pop() or None if len(hosts) == 1 else None,
        first_step=waiting.iteration,
        last_step=waiting.iteration,
        lost_fraction=1.0,
        confidence=sure,
        evidence=tuple(evidence),
        advice="" if culprits else _look_at(blind, places),
        details={
            "collective": waiting.op,
            "seq": waiting.seq,
            "ranks": list(waiting.key[1]),
            "waiting": sorted(stalled),
            "seconds": round(seconds, 1),
            "stacks": stacks,
            **({"no_records": blind} if blind else {}),
        },
    )


def _unknown(rank: int, end: RankEnd | None) -> str:
    if end is None or end.ended is None:
        return f"no records of rank {rank}: it left no file that can be read"
    return f"no records of rank {rank} from then on: {end.ended.words()}"


def _look_at(blind: list[int], places: Mapping[int, Place]) -> str:
    rank = blind[0]
    host = places[rank].host if rank in places else ""
    more = f" (and {len(blind) - 1} more without records)" if len(blind) > 1 else ""
    return (
        f"Look at rank {rank}{more}{f' on {host}' if host else ''}, of which nothing is recorded: whether "
        "its process still runs and where it stands (`py-spy dump --pid PID`); then, in its log, why it "
        "keeps no trace."
    )


def _words(waiting: OpenOperation) -> str:
    ranks = waiting.key[1]
    if waiting.is_transfer:
        return f"the edge from rank {ranks[0]} to rank {ranks[1]}" if len(ranks) == 2 else "an edge"
    return f"the {waiting.key[0]} group"


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
        if end.inside == "pause" and not is_silent(end, now):
            return None  # it was told to stand still
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
