"""The report as Markdown, for issues, chats and terminals: the page's order, without its pictures."""

from __future__ import annotations

import numpy as np

from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.findings.text import (
    CAUSE_LABEL,
    MOST_WEAK,
    WEAK_SIGNALS,
    clock_words,
    cost,
    headline,
    limits,
    next_step,
    number_of_ranks,
    sentence,
    time_text,
    weak_signal,
)

from .charts import PART_NAME, breakdown_rows
from .data import CATEGORIES, ReportData
from .style import CAUSE_MARK

_MOST_GRID = 32


def markdown(data: ReportData) -> str:
    """The whole report."""
    lines = [f"# MegaScan: {data.run}" + (" (simulated)" if data.simulated else ""), "", _facts(data), ""]
    for finding in data.findings:
        lines += _finding(data, finding)
    if not data.findings:
        lines += [
            "## No culprit found",
            "",
            f"No rank, link or group held the others up in steps {data.first_step}-{data.last_step} by more "
            "than the usual jitter.",
            "",
        ]
    lines += _weak_signals(data)
    for rank, stack in list(data.stacks.items())[:8]:
        lines += [f"### Where rank {rank} stands", "", "```", stack.rstrip(), "```", ""]
    lines += _grid(data)
    lines += _breakdown(data)
    lines += _clocks(data)
    if data.notes:
        lines += ["## What limits this report", "", *(f"- {note}" for note in limits(data.notes)), ""]
    return "\n".join(lines)


def _weak_signals(data: ReportData) -> list[str]:
    """Folded where Markdown is rendered."""
    if not data.weak_signals:
        return []
    shown = []
    for finding in data.weak_signals[:MOST_WEAK]:
        shown += [f"- {weak_signal(finding)}", *(f"  - {sentence(each)}" for each in finding.evidence)]
    if len(data.weak_signals) > MOST_WEAK:
        shown.append(f"- {len(data.weak_signals) - MOST_WEAK} more: see report.json")
    title = f"<summary>Weak signals ({len(data.weak_signals)})</summary>"
    return ["<details>", title, "", WEAK_SIGNALS, "", *shown, "", "</details>", ""]


def _facts(data: ReportData) -> str:
    layout = ", ".join(f"{name.upper()} {size}" for name, size in data.layout.items() if size and size > 1)
    facts = f"{number_of_ranks(len(data.places))} ({layout or 'no parallelism'})"
    facts += f", steps {data.first_step}-{data.last_step}"
    if data.step_times.seconds:
        facts += f", median step {time_text(float(np.median(data.step_times.seconds)) * 1e9)}"
    return facts + "."


def _finding(data: ReportData, finding: Finding) -> list[str]:
    return [
        f"## {headline(finding)}",
        "",
        f"Costs **{cost(finding, data.seconds_of(finding))}**. Cause: {CAUSE_LABEL[finding.cause]}, "
        f"confidence {finding.confidence:.2f}.",
        "",
        *(f"- {sentence(each)}" for each in finding.evidence),
        *([""] if finding.evidence else []),
        f"**What to do next.** {next_step(finding, run_ended=data.run_ended, one_host=data.one_host)}",
        "",
    ]


def _grid(data: ReportData) -> list[str]:
    columns = sorted({(place.dp, place.cp) for place in data.places})
    if not data.places or len(columns) > _MOST_GRID:
        return []
    verdicts = data.verdicts
    by_place = {(place.dp, place.cp, place.pp, place.tp): place for place in data.places}
    with_cp = len({cp for _, cp in columns}) > 1
    names = [f"dp {dp} cp {cp}" if with_cp else f"dp {dp}" for dp, cp in columns]
    lines = ["## Ranks", "", f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for pp, tp in sorted({(place.pp, place.tp) for place in data.places}):
        cells = []
        for dp, cp in columns:
            place = by_place.get((dp, cp, pp, tp))
            if place is None:
                cells.append("")
                continue
            cause = verdicts.get(place.rank)
            gone = "no trace" if place.rank in data.missing else "ended" if place.rank in data.ended else ""
            if cause:
                cells.append(f"**{place.rank} {CAUSE_MARK[cause][1]}**")
            else:
                cells.append(f"{place.rank} ({gone})" if gone else str(place.rank))
        lines.append(f"| stage {pp}, tp {tp} | {' | '.join(cells)} |")
    used = dict.fromkeys(verdicts.values())
    if used:
        lines += ["", ", ".join(f"{CAUSE_MARK[cause][1]}: {CAUSE_LABEL[cause]}" for cause in used)]
    return [*lines, ""]


def _breakdown(data: ReportData) -> list[str]:
    rows = breakdown_rows(data)
    if not rows:
        return []
    shown = [index for index in range(len(CATEGORIES)) if any(shares[index] >= 5e-4 for _, shares, _ in rows)]
    names = [PART_NAME[CATEGORIES[index]] for index in shown]
    lines = ["## Where the time goes", "", f"| | {' | '.join(names)} |", "|---" + "|---:" * len(shown) + "|"]
    for name, shares, culprit in rows:
        cells = " | ".join(f"{100 * shares[index]:.1f} %" for index in shown)
        lines.append(f"| {f'**{name}**' if culprit else name} | {cells} |")
    return [*lines, ""]


def _clocks(data: ReportData) -> list[str]:
    words = clock_words(data.clocks.reference, data.clocks.one_clock, data.clocks.residual_p99_ns)
    if not words and not data.clocks.notes:
        return []
    notes = [f"- {note}" for note in data.clocks.notes]
    return ["## Clocks", "", *([words, ""] if words else []), *notes, *([""] if notes else [])]
