"""From a run's trace to its report: Markdown, JSON and one HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ScanError
from mt_megatron.scan.analysis.trace import Trace, open_trace
from mt_megatron.scan.diagnose.run import Diagnosis, diagnose
from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.findings.recorded import findings_on_record, unclaimed
from mt_megatron.scan.findings.text import claims_and_signals, named_before, rank_list
from mt_megatron.scan.format.permissions import make_private_folder
from mt_megatron.scan.format.recording_end import ended_of
from mt_megatron.scan.format.records import KIND, OPEN
from mt_megatron.scan.format.run_files import write_private
from mt_megatron.scan.format.segments import RankTrace, dropped_events

from .breakdown import Look, Meetings, breakdown, look
from .data import ClockFacts, Excerpt, ReportData, StepTimes
from .excerpt import excerpt, ranks_to_show, steps_to_show, title_for, told
from .html import page
from .markdown import markdown

_MOST_SPANS = 2_000_000
"""Of all ranks together that the breakdown keeps at a time; it looks at fewer steps of larger runs."""

_MOST_STEPS = 12
_MOST_STACKS = 64
_STEPS_OF_A_HANG = 4


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """Where a report was written, and what it says."""

    html: Path
    markdown: Path
    json: Path
    data: ReportData


def write_report(
    run: Path | str,
    output: Path | None = None,
    *,
    first_step: int | None = None,
    last_step: int | None = None,
    start: int | None = None,
) -> ReportFiles:
    """Diagnose a start of ``run`` (``start`` as ``open_trace``) and write ``report.html``, ``report.md`` and
    ``report.json`` into ``output`` (``RUN/scan/report`` by default). Raises ``ScanError`` when there is no
    trace to read, ``OSError``."""
    data = gather(run, first_step=first_step, last_step=last_step, start=start)
    folder = output.resolve() if output else open_folder(run)
    make_private_folder(folder)
    files = ReportFiles(
        html=folder / "report.html", markdown=folder / "report.md", json=folder / "report.json", data=data
    )
    write_private(files.html, page(data))
    write_private(files.markdown, markdown(data))
    write_private(files.json, json.dumps(data.to_dict(), indent=1) + "\n")
    return files


def open_folder(run: Path | str) -> Path:
    """Where the report of ``run`` lies unless asked otherwise."""
    from mt_megatron.scan.format.run_files import existing_run

    return existing_run(run).root / "report"


def gather(
    run: Path | str,
    *,
    first_step: int | None = None,
    last_step: int | None = None,
    start: int | None = None,
) -> ReportData:
    """Everything the report shows, of the steps named. Raises ``ScanError``."""
    trace = open_trace(run, start=start)
    diagnosis = diagnose(trace, first_step=first_step, last_step=last_step)
    findings, weak = claims_and_signals(diagnosis.findings)
    survey = _Ranks(trace, first_step, last_step)
    if not survey.times.steps and not findings:
        raise ScanError(
            f"found no whole step in {trace.files.root}; expected some between {first_step or 'the first'} "
            f"and {last_step or 'the last'}. Let the run finish a few steps, or ask for others"
            + "".join(f" ({note})" for note in trace.notes)
        )
    survey.first_pass(findings)
    # Of a part of the steps nothing is known of what was named in others.
    whole = first_step is None and last_step is None
    recorded = findings_on_record(trace.files) if whole else []
    return ReportData(
        run=trace.files.root.parent.resolve().name,
        simulated=trace.simulated,
        layout={name: int(size) for name, size in dict(trace.facts.get("layout", {})).items() if size},
        places=tuple(trace.places[rank] for rank in sorted(trace.places)),
        missing=frozenset(trace.missing),
        first_step=min([*survey.times.steps[:1], *(each.first_step for each in findings)]),
        last_step=max([*survey.times.steps[-1:], *(each.last_step for each in findings)]),
        findings=findings,
        step_times=survey.times,
        excerpts=tuple(survey.excerpts(findings)),
        breakdown=breakdown(list(survey.looks.values()), survey.meetings),
        clocks=_clocks(trace),
        ended=survey.ended,
        stacks=_stacks(survey.stacks, findings),
        weak_signals=weak,
        run_ended=trace.simulated or (survey.closed > 0 and not survey.recording),
        notes=_notes(trace, diagnosis, survey, unclaimed(recorded, findings)),
    )


class _Ranks:
    """One pass over all ranks' files, and what it kept of them."""

    def __init__(self, trace: Trace, first_step: int | None, last_step: int | None) -> None:
        self.trace = trace
        self.meetings = Meetings()
        self.looks: dict[int, Look] = {}
        self.names: dict[int, RankTrace] = {}
        """Strings and groups of the ranks in the timelines, without their records."""
        self.stacks: dict[int, str] = {}
        self.ended: dict[int, str] = {}
        """When and why the tracing of which ranks failed."""
        self.recording = 0
        """Ranks whose recording has not ended, as far as their files say."""
        self.closed = 0
        """Ranks that closed their traces in good order."""
        self.notes: list[str] = []
        self._bounds: dict[int, tuple[int, int]] = {}
        self._first, self._last = first_step, last_step
        self.times = StepTimes()
        for rank in trace.ranks:
            # One rank says which steps there are; one that was started again may have none yet.
            self.times = self._step_times(trace.rank(rank), rank)
            if self.times.steps:
                break

    def first_pass(self, findings: Sequence[Finding]) -> None:
        """Read every rank once; steps to look at are chosen by what the first rank says of them."""
        wanted, chosen = self._wanted(findings)
        dropped: dict[int, int] = {}
        for rank in self.trace.ranks:
            read = self.trace.rank(rank)
            self._step_times(read, rank)
            self.looks[rank] = look(
                rank,
                read,
                wanted,
                lambda times, rank=rank: self.trace.clocks.to_reference(rank, times),  # type: ignore[misc]
                self.meetings,
            )
            if rank in chosen:
                self.names[rank] = replace(read, spans=read.spans[:0])
            self._read_notes(rank, read, dropped)
        self.times = self._lengths()
        alike: dict[str, list[int]] = {}
        for rank, words in self.ended.items():
            alike.setdefault(words, []).append(rank)
        self.notes += [
            f"of rank{'s' * (len(ranks) > 1)} {rank_list(ranks)} nothing is known from then on: {words}"
            for words, ranks in alike.items()
        ]
        if dropped:
            worst = max(dropped, key=lambda each: dropped[each])
            self.notes.append(
                f"{sum(dropped.values())} events were dropped on {len(dropped)} ranks, most on rank {worst}"
            )

    def excerpts(self, findings: Sequence[Finding]) -> list[Excerpt]:
        """A step before and a step with each of the first findings."""
        found = []
        shown = told(findings)
        for number, finding in enumerate(shown):
            ranks = ranks_to_show(finding, self.trace.places)
            culprits = finding.ranks if finding else ()
            for title, step in steps_to_show(finding, self._first_times):
                title = title_for(finding, title, len(shown) > 1)
                one = excerpt(
                    title,
                    step,
                    ranks,
                    culprits,
                    self.looks,
                    self.names,
                    self.meetings,
                    most=self._most(finding),
                )
                if one is not None:
                    found.append(replace(one, finding=number))
        return found

    def _most(self, finding: Finding | None) -> int | None:
        """ns to show of a step: minutes of nothing say no more than a few usual steps of it."""
        if finding is None or finding.cause != "hang" or not self.times.seconds:
            return None
        return int(_STEPS_OF_A_HANG * float(np.median(self.times.seconds)) * 1e9)

    def _wanted(self, findings: Sequence[Finding]) -> tuple[NDArray[np.int64], set[int]]:
        self._first_times = self.times
        shown = told(findings)
        steps = {step for finding in shown for _, step in steps_to_show(finding, self.times)}
        ranks = {rank for finding in shown for rank in ranks_to_show(finding, self.trace.places)}
        whole = np.asarray(self.times.steps)
        per_step = max(1.0, self._spans_per_step) * len(self.trace.ranks)
        room = int(min(_MOST_STEPS, max(2, _MOST_SPANS / per_step - len(steps))))
        spread = whole[np.linspace(0, len(whole) - 1, min(room, len(whole))).round().astype(int)].astype(int)
        return np.array(sorted(steps | set(spread.tolist())), dtype=np.int64), ranks

    def _step_times(self, read: RankTrace, rank: int) -> StepTimes:
        """Enter one rank's steps; returns this rank's own times."""
        spans = read.spans[(read.spans["kind"] == KIND["step"]) & (read.spans["end"] != OPEN)]
        numbers = spans["iteration"]
        keep = np.ones(len(spans), dtype=bool)
        keep &= numbers >= (self._first if self._first is not None else numbers)
        keep &= numbers <= (self._last if self._last is not None else numbers)
        spans = spans[keep]
        begins = self.trace.clocks.to_reference(rank, spans["begin"].astype(np.int64)).tolist()
        ends = self.trace.clocks.to_reference(rank, spans["end"].astype(np.int64)).tolist()
        own: dict[int, float] = {}
        for step, begin, end in zip(spans["iteration"].tolist(), begins, ends, strict=True):
            known = self._bounds.get(step, (begin, end))
            self._bounds[step] = (min(known[0], begin), max(known[1], end))
            own[step] = (end - begin) / 1e9
        self._spans_per_step = len(read.spans) / max(1, len(np.unique(read.spans["iteration"])))
        return StepTimes(steps=tuple(sorted(own)), seconds=tuple(own[step] for step in sorted(own)))

    def _lengths(self) -> StepTimes:
        steps = sorted(self._bounds)
        lengths = ((self._bounds[step][1] - self._bounds[step][0]) / 1e9 for step in steps)
        return StepTimes(steps=tuple(steps), seconds=tuple(lengths))

    def _read_notes(self, rank: int, read: RankTrace, dropped: dict[int, int]) -> None:
        if count := dropped_events(read.notes):
            dropped[rank] = count
        ended = ended_of(read.notes)
        self.recording += ended is None
        self.closed += ended is not None and ended.how == "closed"
        if ended is not None and ended.how == "failed":
            self.ended[rank] = ended.words()
        for note in read.notes:
            if note.get("what") == "stack" and (rank in self.stacks or len(self.stacks) < _MOST_STACKS):
                self.stacks[rank] = _stack_text(note)


def _stacks(stacks: Mapping[int, str], findings: Sequence[Finding]) -> dict[int, str]:
    """Of a hang, those of the culprits first. Without one, nobody stands."""
    hangs = [finding for finding in findings if finding.cause == "hang"]
    culprits = {rank for finding in hangs for rank in finding.ranks}
    ordered = sorted(stacks, key=lambda rank: (rank not in culprits, rank))
    return {rank: stacks[rank] for rank in ordered} if hangs else {}


def _stack_text(note: Mapping[str, Any]) -> str:
    lines = [f"nothing moved for {note.get('silent_seconds', 0):.0f} s"]
    for waiting in note.get("waiting") or ():
        if isinstance(waiting, Mapping):
            lines.append("waits in " + ", ".join(f"{name} {value}" for name, value in waiting.items()))
    for thread, frames in (note.get("stacks") or {}).items():
        lines.append(f"{thread}:")
        lines += [f"  {frame}".rstrip() for frame in (frames if isinstance(frames, list) else [frames])]
    return "\n".join(lines)


def _clocks(trace: Trace) -> ClockFacts:
    return ClockFacts(
        reference=trace.clocks.reference,
        one_clock=all(each.source in ("reference", "same clock") for each in trace.clocks.residuals.values()),
        residual_p99_ns={rank: float(each.residual_p99) for rank, each in trace.clocks.residuals.items()},
        notes=tuple(trace.clocks.notes),
    )


def _notes(trace: Trace, diagnosis: Diagnosis, survey: _Ranks, before: Sequence[Finding]) -> tuple[str, ...]:
    said = [*trace.notes, *getattr(diagnosis, "notes", ()), *survey.notes]
    said += [named_before(each) for each in before]
    own = [note for note in dict.fromkeys(said) if note not in trace.clocks.notes]
    return tuple(own)
