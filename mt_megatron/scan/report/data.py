"""What a report shows, as plain data: the Markdown, JSON and HTML pages are made from this alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.findings.finding import Cause, Finding
from mt_megatron.scan.findings.text import only_host

CATEGORIES = ("compute", "exposed_communication", "waiting", "bubble", "data", "checkpoint", "pause")
"""Parts of a step, without overlap. ``compute``: everything not named below, the optimizer included.
``exposed_communication``: bytes move and the rank does nothing else. ``waiting``: in a collective that a
member has not entered yet. ``bubble``: in a transfer between stages whose other side is not there yet.
``pause``: the process stood still or collected garbage outside of communication."""

BarKind = Literal[
    "forward", "backward", "optimizer", "data", "checkpoint", "pause", "collective", "p2p", "wait", "step"
]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A piece of time in an excerpt, in ns from the excerpt's begin."""

    begin: int
    end: int
    kind: BarKind
    text: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank in an excerpt."""

    rank: int
    culprit: bool
    bars: tuple[Bar, ...]


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """One step of chosen ranks, for the timeline."""

    title: str
    step: int
    length: int
    """ns from the first rank's begin of the step to the last rank's end."""

    rows: tuple[Row, ...]
    finding: int = 0
    """Position of the finding that it belongs to; excerpts of one are drawn to one scale."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where the time of the steps looked at went; shares of the step, in the order of ``CATEGORIES``."""

    steps: tuple[int, ...] = ()
    seconds: float = 0.0
    """Mean length of those steps."""

    overall: tuple[float, ...] = ()
    ranks: dict[int, tuple[float, ...]] = field(default_factory=dict)
    matched: float = 0.0
    """Share of the communication whose other side was found: only there is waiting told from moving."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Length of each step of the run: the last rank's end minus the first rank's begin."""

    steps: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClockFacts:
    """How well the ranks' clocks agree after they were put right, in ns; empty without measurements."""

    reference: int = 0
    one_clock: bool = False
    """All ranks run on one machine and read the same clock: nothing had to be put right."""

    residual_p99_ns: dict[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything a report shows."""

    run: str
    simulated: bool
    layout: dict[str, int]
    places: tuple[Place, ...]
    first_step: int
    last_step: int
    findings: tuple[Finding, ...]
    """The claims (``Finding.is_claim``), most expensive first: culprits, and what slowed the whole run."""

    step_times: StepTimes
    excerpts: tuple[Excerpt, ...] = ()
    breakdown: Breakdown = field(default_factory=Breakdown)
    clocks: ClockFacts = field(default_factory=ClockFacts)
    missing: frozenset[int] = frozenset()
    """Ranks of the run that left no readable trace."""

    ended: dict[int, str] = field(default_factory=dict)
    """Ranks whose tracing failed: when and why. What they did since is unknown."""

    stacks: dict[int, str] = field(default_factory=dict)
    """Of a hang: what each rank was doing when nothing moved."""

    weak_signals: tuple[Finding, ...] = ()
    """Findings below ``finding.SURE``, surest first: they claim nothing."""

    run_ended: bool = False
    """Whether every rank has closed its trace (or nothing ran): advice for a running job is of no use."""

    notes: tuple[str, ...] = ()
    """What limits the report: ranks without a trace, dropped events, steps not looked at."""

    @property
    def one_host(self) -> bool:
        """Whether the whole run is on one host: there is none to go on without it."""
        return only_host(place.host for place in self.places)

    @property
    def verdicts(self) -> dict[int, Cause]:
        """The most expensive cause of every rank that a finding names."""
        causes: dict[int, Cause] = {}
        for finding in self.findings:
            for rank in finding.ranks:
                causes.setdefault(rank, finding.cause)
        return causes

    def seconds_of(self, finding: Finding) -> float:
        """What the steps of ``finding`` took, as far as they were recorded."""
        times = zip(self.step_times.steps, self.step_times.seconds, strict=True)
        return sum(took for step, took in times if finding.first_step <= step <= finding.last_step)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not finite becomes None."""
        plain: dict[str, Any] = finite(asdict(self))
        plain["breakdown"]["categories"] = list(CATEGORIES)
        plain["verdicts"] = {str(rank): cause for rank, cause in sorted(self.verdicts.items())}
        return plain


def finite(value: Any) -> Any:
    """``value`` for JSON, which has no word for what is not finite: None instead."""
    if isinstance(value, dict):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
