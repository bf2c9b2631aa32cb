"""How a diagnosis is judged against the truth: found, missed, or confidently wrong, counted apart.

A *claim* is a finding with a confidence of at least 0.5 whose cause is not ``unknown``; everything else is
advice and never counts as right or wrong. A claim *fits* a fault when place and cause are right:

place   the rank of a rank's fault, nobody else; for uneven work of a whole replica any of its ranks;
        both ends of a slow link, nobody else; the members of a slow group; all ranks of the machine
        behind a slow node link, or its name (of two machines either: they share that border)
cause   the same word; besides ``slow_link`` for a slow group of two, and for a node link that one pair uses

A fault is *placed* when a claim has its place, *found* when a claim fits it, and *missed* otherwise. A trial
is *confidently wrong* when any claim in it fits no fault, however many others fit: a right answer does
not excuse a wrong one, and the right rank with the wrong cause is wrong. In a clean run each claim is an
alert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mt_megatron.scan.findings.finding import SURE, Finding

from .faults import Fault, used_pairs
from .layout import Layout


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One trial judged."""

    category: str
    seed: int
    placed: tuple[bool, ...]
    """Of each fault."""

    found: tuple[bool, ...]
    claims: int
    wrong_place: int
    """Claims whose place is no fault's."""

    wrong_cause: int
    """Claims at a fault's place with another cause."""

    cause: str
    """The true one of a single fault."""

    named: str
    """The cause of the claim with the highest confidence, of equal ones with the most time lost; ``unknown``
    without a claim."""

    lost_fraction: float | None = None
    """What the faults really cost, where somebody asked."""

    seconds: float = 0.0
    """What the diagnosis took."""

    said: tuple[str, ...] = ()
    """The claims in words."""

    setting: str = ""
    """Layout and faults in words."""

    @property
    def wrong(self) -> bool:
        """Confidently wrong."""
        return self.wrong_place + self.wrong_cause > 0


def claims(findings: Iterable[Finding]) -> list[Finding]:
    """Those that count, the surest first."""
    confident = [each for each in findings if each.confidence >= SURE and each.cause != "unknown"]
    return sorted(confident, key=lambda each: (-each.confidence, -each.lost_fraction))


def has_place(finding: Finding, fault: Fault, layout: Layout) -> bool:
    """Whether ``finding`` points at where ``fault`` is."""
    named, culprits = {*finding.ranks}, {*fault.culprits(layout)}
    if fault.host is not None:
        hosts = range(layout.hosts) if layout.hosts == 2 else [fault.host]
        names = {layout.host_name(host) for host in hosts}
        members = [
            {rank for rank in range(layout.world_size) if layout.host_of(rank) == host} for host in hosts
        ]
        pairs = _across(layout, fault.host)
        return finding.host in names or named in members or (len(pairs) == 1 and named == {*pairs[0]})
    if fault.cause == "uneven_work" and len(culprits) > 1:
        return bool(named) and named <= culprits
    return named == culprits


def fits(finding: Finding, fault: Fault, layout: Layout) -> bool:
    """Whether ``finding`` says what ``fault`` is, and where."""
    accepted = {fault.cause}
    if fault.cause == "slow_group" and len(fault.culprits(layout)) == 2:
        accepted.add("slow_link")
    if fault.host is not None and len(_across(layout, fault.host)) == 1:
        accepted.add("slow_link")
    return finding.cause in accepted and has_place(finding, fault, layout)


def _across(layout: Layout, host: int) -> list[tuple[int, int]]:
    return [
        pair
        for pair in used_pairs(layout)
        if (layout.host_of(pair[0]) == host) != (layout.host_of(pair[1]) == host)
    ]


def judged(
    category: str,
    seed: int,
    findings: Iterable[Finding],
    faults: Sequence[Fault],
    layout: Layout,
    **more: object,
) -> Verdict:
    """The verdict on ``findings`` of a run with ``faults``; ``more`` are fields of ``Verdict``."""
    made = claims(findings)
    misfits = [claim for claim in made if not any(fits(claim, fault, layout) for fault in faults)]
    at_place = [claim for claim in misfits if any(has_place(claim, fault, layout) for fault in faults)]
    return Verdict(
        category=category,
        seed=seed,
        placed=tuple(any(has_place(claim, fault, layout) for claim in made) for fault in faults),
        found=tuple(any(fits(claim, fault, layout) for claim in made) for fault in faults),
        claims=len(made),
        wrong_place=len(misfits) - len(at_place),
        wrong_cause=len(at_place),
        cause=faults[0].cause if len(faults) == 1 else "",
        named=made[0].cause if made else "unknown",
        said=tuple(_in_words(claim) for claim in made),
        **more,  # type: ignore[arg-type]
    )


def _in_words(claim: Finding) -> str:
    ranks = ",".join(map(str, claim.ranks[:8]))
    return f"{claim.cause} ranks {ranks} host {claim.host} confidence {claim.confidence:.2f}"


def confusion(verdicts: Iterable[Verdict]) -> dict[str, Counter[str]]:
    """True cause -> how often each cause was named; single faults only."""
    made: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        if verdict.cause:
            made.setdefault(verdict.cause, Counter())[verdict.named] += 1
    return made


def f1_by_cause(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Of each true cause: the harmonic mean of precision and recall of the named causes. The mean over the
    causes is the macro-F1; clean runs are counted elsewhere."""
    table = confusion(verdicts)
    made = {}
    for cause, row in table.items():
        right = row[cause]
        named = sum(each[cause] for each in table.values())
        made[cause] = 2 * right / (sum(row.values()) + named) if right else 0.0
    return made
