"""How a traced run stands right now: the last steps, ranks that are silent, what was found so far."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mt_megatron.errors import ScanError
from mt_megatron.scan.diagnose.run import diagnose
from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.findings.recorded import findings_on_record, unclaimed
from mt_megatron.scan.findings.text import claims_and_signals
from mt_megatron.scan.format.recording_end import Ended, read_ended
from mt_megatron.scan.format.records import KIND, OPEN
from mt_megatron.scan.format.run_files import RunFiles, existing_run, read_run, segment_paths
from mt_megatron.scan.format.segments import RankTrace, dropped_events, read_segments, readable_segments

_LAST_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank."""

    rank: int
    host: str
    step: int
    """The last that ended; -1 before the first."""

    step_seconds: float
    """Median of the last ones; NaN before the first."""

    silent_seconds: float
    """Since its file grew last. A rank that records nothing is silent too."""

    level: str
    dropped: int
    inside: str
    """What it has been in for more than a second when it wrote last: ``dp all_reduce 41``; else empty."""

    ended: Ended | None = None
    """How its recording ended; None while it goes on, and of a rank that was killed."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """All ranks."""

    run: str
    simulated: bool
    ranks: tuple[RankStatus, ...]
    findings: tuple[Finding, ...]
    """The claims: of a run that has ended those of the report, before that what the watcher has named."""

    weak_signals: int = 0
    """Findings below ``finding.SURE``; known once the run has ended."""

    named_before: tuple[Finding, ...] = ()
    """What the watcher named and the judgement of all steps does not claim."""

    absent: tuple[int, ...] = ()
    """Ranks of the run that have no file that can be read."""

    @property
    def ended(self) -> bool:
        """Whether all steps there will be are there: every rank has closed its trace, or nothing ran."""
        how = [rank.ended.how for rank in self.ranks if rank.ended is not None]
        return self.simulated or (len(how) == len(self.ranks) and "closed" in how)

    @property
    def not_recording(self) -> tuple[int, ...]:
        """Ranks whose tracing failed."""
        return tuple(rank.rank for rank in self.ranks if rank.ended and rank.ended.how == "failed")

    @property
    def step(self) -> int:
        """The last step that every rank has ended, of those that record."""
        steps = [rank.step for rank in self.ranks if rank.rank not in self.not_recording]
        return min(steps or [rank.step for rank in self.ranks], default=-1)

    @property
    def step_seconds(self) -> float:
        """Median over the ranks."""
        known = [rank.step_seconds for rank in self.ranks if rank.step_seconds == rank.step_seconds]
        return float(np.median(known)) if known else float("nan")


def run_status(run: Path | str, before: RunStatus | None = None) -> RunStatus:
    """Read the newest segments of every rank. Raises ``ScanError`` when there is no trace that can be read.

    A run that has ended is judged by all of its steps, as ``scan report`` does. ``before``: an earlier
    status of the same run, whose judgement is kept if the run had ended then.
    """
    files = existing_run(run)
    facts: dict[str, Any] = {}
    ranks: list[RankStatus] = []
    unreadable: list[ScanError] = []
    for rank in files.ranks():
        try:
            found = _rank(files, rank)
        except ScanError as error:
            unreadable.append(error)
        else:
            ranks += [] if found is None else [found]
    if unreadable and not ranks:
        raise unreadable[0]
    with contextlib.suppress(ScanError):
        facts = read_run(files)
    status = RunStatus(
        run=files.root.parent.resolve().name,
        simulated=bool(facts.get("simulated", False)),
        ranks=tuple(ranks),
        findings=tuple(findings_on_record(files)),
        absent=tuple(sorted(set(range(int(facts.get("world_size", 0)))) - {each.rank for each in ranks})),
    )
    if not status.ended or status.step < 0:
        return replace(status, findings=tuple(each for each in status.findings if each.is_claim))
    if before is not None and before.ended and before.step == status.step:
        kept = before
        return replace(
            status, findings=kept.findings, weak_signals=kept.weak_signals, named_before=kept.named_before
        )
    claims, weak = claims_and_signals(diagnose(Path(run)).findings)
    return replace(
        status,
        findings=claims,
        weak_signals=len(weak),
        named_before=tuple(unclaimed(status.findings, claims)),
    )


def _rank(files: RunFiles, rank: int) -> RankStatus | None:
    """None of a rank that has no file. Raises ``ScanError`` when its newest ones cannot be read."""
    paths = segment_paths(files.rank_folder(rank))
    if not paths:
        return None
    try:
        modified = paths[-1].stat().st_mtime
    except PermissionError:
        raise
    except OSError:
        return None
    # A segment that was begun just now may hold no whole step yet; the one before may be of an earlier start.
    readable, damaged = readable_segments(paths[-2:])
    if damaged and not readable:
        raise ScanError(next(iter(damaged.values())))
    known = [(path, int(meta.get("session", 0))) for path, meta in readable]
    read = read_segments([path for path, session in known if session == known[-1][1]])
    spans = read.spans
    ended = spans[(spans["kind"] == KIND["step"]) & (spans["end"] != OPEN)]
    last = ended[np.argsort(ended["end"])][-_LAST_STEPS:]
    ended = read_ended(files.rank_folder(rank), int(read.meta.get("session", 0)))
    # A recorder's end is a change to off; what it recorded until then is of interest.
    said = [note for note in read.notes if note.get("what") == "level"]
    levels = [note.get("before" if ended and note.get("level") == "off" else "level") for note in said]
    return RankStatus(
        rank=rank,
        host=str(read.meta.get("host", "")),
        step=int(last["iteration"][-1]) if len(last) else -1,
        step_seconds=float(np.median(last["end"] - last["begin"])) / 1e9 if len(last) else float("nan"),
        silent_seconds=max(0.0, time.time() - modified),
        level=str(levels[-1] if levels else read.meta.get("level", "")),
        dropped=dropped_events(read.notes),
        inside=_inside(read),
        ended=ended,
    )


def _inside(read: RankTrace) -> str:
    """The innermost communication that was still open when the rank wrote last."""
    spans = read.spans[(read.spans["end"] == OPEN)]
    spans = spans[np.isin(spans["kind"], [KIND["collective"], KIND["p2p"]])]
    if not len(spans):
        return ""
    span = spans[np.argmax(spans["begin"])]
    number = int(span["name"])
    name = read.strings[number] if 0 < number < len(read.strings) else ""
    group = read.groups.get(int(span["group"]))
    where = f"{group.name} " if group else ""
    who = f" {'to' if name.startswith('send') else 'from'} {int(span['peer'])}" if span["peer"] >= 0 else ""
    seq = f" {int(span['seq'])}" if span["seq"] >= 0 else ""
    return f"{where}{name}{who}{seq}".strip()
