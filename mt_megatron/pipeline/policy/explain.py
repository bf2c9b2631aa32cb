"""The decisions of a run in words: which link was slow, what was decided, what it brought."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Sentences about the records of a log, in their order, and a summary at the end."""
    if not records:
        yield "no decision is logged: the run ended before its second step"
        return
    for record in records:
        yield from _SHOWN[record["record"]](record)
    yield from _summary(records)


def _start(record: Record) -> Iterator[str]:
    cap, limit = record["cap"], ""
    if cap is not None and record.get("cap_in_bytes"):
        limit = f"; a rank fills at most {min(cap) / 2**30:.4g} GiB"
    elif cap is not None:
        limit = f"; a rank keeps at most {min(cap):g} activations of a chunk"
    chunks = record["chunks"]
    yield (
        f"step {record['step'] + 1}: begins with {record['schedule']}: {record['ranks']} ranks of {chunks} "
        f"chunk{'s' * (chunks > 1)}, {record['microbatches']} micro-batches, {record['pipelines']} "
        f"pipeline{'s' * (record['pipelines'] > 1)}{limit}"
    )


def _decision(record: Record) -> Iterator[str]:
    step = record["step"] + 1
    if record["switched"]:
        yield f"step {step}: {record['from']} -> {record['to']}"
    else:
        yield f"step {step}: {record['from']} stays"
    yield f"  because: {record['reason']}"
    slow = record["slow_edge"]
    if slow is None:
        yield "  links: none stands out"
    else:
        others = [
            seconds
            for source, target, seconds in record["inputs"]["delays"]
            if {source, target} != set(slow[:2])
        ]
        usual = f"; the slowest other one {_time(max(others))}" if others else ""
        yield f"  slow link: rank {slow[0]} -> rank {slow[1]}, {_time(slow[2])} a message{usual}"
    yield (
        f"  predicted: {_time(record['predicted_seconds'])} a step "
        f"instead of {_time(record['predicted_seconds_before'])} ({record['predicted_gain']:+.1%}; "
        f"noise {record['noise']:.1%})"
    )
    best = sorted(record["considered"].items(), key=lambda each: each[1])[:_SHOWN_MOST]
    yield "  considered: " + ", ".join(f"{label} {_time(seconds)}" for label, seconds in best)
    if record["past_the_cap"]:
        yield "  past the memory cap: " + ", ".join(record["past_the_cap"])


_SHOWN_MOST = 4
"""Schedules that were considered, by name, at most."""


def _outcome(record: Record) -> Iterator[str]:
    yield (
        f"step {record['step'] + 1}: the switch before step {record['decision'] + 1} brought "
        f"{record['gain']:+.1%} of a step ({_time(record['seconds_before'])} -> "
        f"{_time(record['seconds'])}, medians of {record['steps_before']} and {record['steps']} steps; "
        f"predicted {record['predicted_gain']:+.1%})"
    )


def _note(record: Record) -> Iterator[str]:
    yield f"step {record['step'] + 1}: {record['text']}"


_SHOWN = {"start": _start, "decision": _decision, "outcome": _outcome, "note": _note}


def _summary(records: Sequence[Record]) -> Iterator[str]:
    decisions = [each for each in records if each["record"] == "decision"]
    switched = [each for each in decisions if each["switched"]]
    outcomes = [each for each in records if each["record"] == "outcome"]
    seconds = sum(each["seconds_to_decide"] for each in decisions)
    # A start is the first record, or that of a process that went on.
    used = [each.get("schedule") or each["to"] for each in records if "schedule" in each or each in switched]
    ends = " at first, ".join(dict.fromkeys((used[0], used[-1]))) + " at the end" * (used[0] != used[-1])
    yield (
        f"in all: {ends}; {len(decisions)} decisions, {len(switched)} switches, {seconds:.2g} s spent on "
        "deciding"
    )
    links: dict[tuple[int, int], int] = {}
    for each in decisions:
        if each["slow_edge"] is not None:
            source, target, _ = each["slow_edge"]
            pair = min(source, target), max(source, target)
            links[pair] = links.get(pair, 0) + 1
    for (one, other), count in sorted(links.items(), key=lambda each: -each[1]):
        yield f"slow link between ranks {one} and {other}: in {count} of {len(decisions)} decisions"
    if outcomes:
        better = sum(each["gain"] > 0 for each in outcomes)
        yield f"of {len(outcomes)} switches with a known outcome {better} made steps shorter"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
