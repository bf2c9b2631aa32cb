"""Which steps and ranks the report's timeline shows, and their bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mt_megatron.scan.analysis.intervals import Times
from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.findings.text import CAUSE_LABEL, rank_list, time_text
from mt_megatron.scan.format.records import KIND, KINDS
from mt_megatron.scan.format.segments import RankTrace

from .breakdown import Look, Meetings, waits
from .data import Bar, BarKind, Excerpt, Row, StepTimes

_MOST_ROWS = 10
_MOST_FINDINGS = 3
_FINEST = 1500
"""Pieces of an excerpt's length: what is shorter, or nearer to its like, is joined with it."""

_PASSES: tuple[BarKind, ...] = ("forward", "backward", "optimizer", "data", "checkpoint", "pause")
_EXCHANGES: tuple[BarKind, ...] = ("collective", "p2p")


def steps_to_show(finding: Finding | None, times: StepTimes) -> list[tuple[str, int]]:
    """``(title, step)``: the usual step before the finding, if there is one, and a step of it."""
    steps = np.asarray(times.steps)
    seconds = np.asarray(times.seconds)
    if not len(steps):
        if finding is None or finding.cause != "hang":
            return []
        return [(f"Step {finding.last_step}, which does not end", finding.last_step)]
    if finding is None:
        return [("A usual step", _usual(steps, seconds))]
    within = (steps >= finding.first_step) & (steps <= finding.last_step)
    before = steps < finding.first_step
    if before.sum() > 1:
        # The first step warms up: it is like no other.
        before &= steps > steps[0]
    after = steps > finding.last_step
    chosen = []
    if before.any():
        step = _usual(steps[before][-20:], seconds[before][-20:])
        chosen.append((f"Step {step}, before it began", step))
    elif after.any():
        step = _usual(steps[after][:20], seconds[after][:20])
        chosen.append((f"Step {step}, after it ended", step))
    if finding.cause == "hang":
        chosen.append((f"Step {finding.last_step}, which does not end", finding.last_step))
    elif within.any():
        step = _usual(steps[within], seconds[within])
        chosen.append((f"Step {step}, with it", step))
    return chosen


def ranks_to_show(finding: Finding | None, places: Mapping[int, Place]) -> list[int]:
    """The culprits, and whom they meet: tensor-parallel partners, neighbouring stages, replicas."""
    culprits = list(finding.ranks[:4]) if finding else []
    chosen = [rank for rank in culprits if rank in places]
    others = sorted(places.values(), key=lambda each: (_distance(each, culprits, places), each.rank))
    for place in others:
        if len(chosen) >= _MOST_ROWS:
            break
        if place.rank not in chosen:
            chosen.append(place.rank)
    return sorted(chosen, key=lambda rank: (places[rank].dp, places[rank].pp, places[rank].tp, rank))


def told(findings: Sequence[Finding]) -> list[Finding | None]:
    """Whose timeline is shown: the most expensive findings, or nobody's."""
    return [*findings[:_MOST_FINDINGS]] or [None]


def excerpt(
    title: str,
    step: int,
    ranks: Sequence[int],
    culprits: Sequence[int],
    looks: Mapping[int, Look],
    traces: Mapping[int, RankTrace],
    meetings: Meetings,
    *,
    most: int | None = None,
) -> Excerpt | None:
    """The bars of ``step``, of its first ``most`` ns; None when none of the ranks recorded it."""
    there = [looks[rank] for rank in ranks if rank in looks]
    own = [seen.spans["iteration"] == step for seen in there]
    begins = [int(seen.first[rows].min()) for seen, rows in zip(there, own, strict=True) if rows.any()]
    ends = [int(seen.last[rows].max()) for seen, rows in zip(there, own, strict=True) if rows.any()]
    if not begins:
        return None
    origin = min(begins)
    length = max(ends) - origin
    if most is not None and length > most:
        length, title = most, f"{title} (the first {time_text(most)} of {time_text(length)})"
    rows = [
        Row(
            rank=seen.rank,
            culprit=seen.rank in culprits,
            bars=tuple(_bars(seen, traces[seen.rank], step, origin, length, meetings)),
        )
        for seen in there
    ]
    return Excerpt(title=title, step=step, length=length, rows=tuple(rows))


def title_for(finding: Finding | None, title: str, several: bool) -> str:
    """With several findings each excerpt says whose it is."""
    if finding is None or not several:
        return title
    who = f"{'Rank' if len(finding.ranks) == 1 else 'Ranks'} {rank_list(finding.ranks)}"
    if finding.whole_run or not finding.ranks:
        who = "The whole run"
    # The same ranks may be named for two causes.
    return f"{who}, {CAUSE_LABEL[finding.cause]}: {title[0].lower()}{title[1:]}"


def _bars(seen: Look, trace: RankTrace, step: int, origin: int, length: int, meetings: Meetings) -> list[Bar]:
    own = seen.spans["iteration"] == step
    until, _ = waits(seen, meetings)
    finest = max(1, length // _FINEST)
    bars: list[Bar] = []
    for kind in _PASSES:
        rows = np.flatnonzero(own & (seen.kind == KIND[kind]))
        rows = rows[np.argsort(seen.first[rows], kind="stable")]
        for index in rows.tolist():
            begin, end = int(seen.first[index]) - origin, int(seen.last[index]) - origin
            if end - begin >= finest:
                bars.append(Bar(begin=begin, end=end, kind=kind, text=_text(seen, trace, index)))
    for kind in _EXCHANGES:
        rows = np.flatnonzero(own & (seen.kind == KIND[kind]))
        rows = rows[np.argsort(seen.first[rows], kind="stable")]
        names = [_text(seen, trace, index) for index in rows.tolist()]
        bars += _joined(until[rows] - origin, seen.last[rows] - origin, kind, names, finest)
        bars += _joined(seen.first[rows] - origin, until[rows] - origin, "wait", names, finest)
    cut = (replace(bar, end=min(bar.end, length)) for bar in bars if bar.begin < length)
    return list(cut)


def _joined(begins: Times, ends: Times, kind: BarKind, names: Sequence[str], finest: int) -> list[Bar]:
    """Neighbours too near to be told apart become one bar."""
    bars: list[Bar] = []
    current: list[int] | None = None
    inside: list[str] = []

    def close() -> None:
        if current is not None and current[1] - current[0] >= finest // 2:
            distinct = list(dict.fromkeys(inside))
            text = ", ".join(distinct[:3]) + (" ..." if len(distinct) > 3 else "")
            text += f" ({len(inside)})" if len(inside) > 1 else ""
            prefix = "waiting in " if kind == "wait" else ""
            bars.append(Bar(begin=current[0], end=current[1], kind=kind, text=prefix + text))

    for begin, end, name in zip(begins.tolist(), ends.tolist(), names, strict=True):
        if end <= begin:
            continue
        if current is not None and begin - current[1] < finest:
            current[1] = max(current[1], end)
            inside.append(name)
            continue
        close()
        current, inside = [begin, end], [name]
    close()
    return bars


def _text(seen: Look, trace: RankTrace, index: int) -> str:
    span = seen.spans[index]
    kind = KINDS[int(span["kind"])]
    number = int(span["name"])
    name = trace.strings[number] if 0 < number < len(trace.strings) else ""
    if kind == "collective":
        group = trace.groups.get(int(span["group"]))
        return f"{group.name if group else ''} {name or kind}".strip()
    if kind == "p2p":
        return f"{name or kind} {'to' if name.startswith('send') else 'from'} {int(span['peer'])}"
    microbatch = int(span["microbatch"])
    if kind in ("forward", "backward") and microbatch >= 0:
        return f"{kind} of micro-batch {microbatch}"
    return f"{kind} {name}".strip()


def _usual(steps: np.ndarray, seconds: np.ndarray) -> int:
    """The step whose length is nearest to the median."""
    return int(steps[np.argmin(np.abs(seconds - np.median(seconds)))])


def _distance(place: Place, culprits: Sequence[int], places: Mapping[int, Place]) -> int:
    """How little a rank has to do with the culprits."""
    nearest = 99
    for rank in culprits:
        other = places.get(rank)
        if other is None:
            continue
        axes = (place.dp != other.dp) + (place.cp != other.cp)
        nearest = min(nearest, 4 * axes + abs(place.pp - other.pp) + (place.tp != other.tp))
    return nearest
