"""The report as one self-contained HTML page: culprit, cost, evidence, what to do; then the pictures."""

from __future__ import annotations

from functools import partial
from html import escape

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
    place_text,
    sentence,
    time_text,
    weak_signal,
)
from mt_megatron.scan.report import grid, timeline

from .charts import (
    breakdown_bars,
    breakdown_legend,
    breakdown_rows,
    cut_off,
    in_both_widths,
    step_times,
)
from .data import ReportData
from .style import CAUSE_MARK, CSS, PATTERNS, SCRIPT

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(data: ReportData) -> str:
    """The whole page. It fetches nothing, and its own policy forbids it to."""
    title = f"MegaScan: {data.run}"
    body = [
        _head(data),
        *(_card(data, finding) for finding in data.findings),
        *([] if data.findings else [_all_well(data)]),
        _weak_signals(data),
        _stacks(data),
        _steps(data),
        _grid(data),
        _timelines(data),
        _breakdown(data),
        _clocks(data),
        _limits(data),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>{PATTERNS}<main>\n"
        + "\n".join(part for part in body if part)
        + f'\n</main><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def _head(data: ReportData) -> str:
    badge = '<span class="simulated">simulated</span>' if data.simulated else ""
    layout = ", ".join(f"{name.upper()} {size}" for name, size in data.layout.items() if size and size > 1)
    there = len(data.places) - len(data.missing)
    of = f"{there} of {len(data.places)}" if there < len(data.places) else str(there)
    hosts = len({place.host for place in data.places if place.host}) or 1
    facts = [
        f"{of} rank{'s' * (len(data.places) != 1)} on {hosts} host{'s' * (hosts != 1)}",
        layout or "no parallelism",
        f"steps {data.first_step}-{data.last_step}",
    ]
    if data.step_times.seconds:
        facts.append(f"median step {time_text(float(np.median(data.step_times.seconds)) * 1e9)}")
    line = escape(" \N{MIDDLE DOT} ".join(facts))
    return f'<h1>{escape(data.run)}{badge}</h1><p class="facts">{line}</p>'


def _card(data: ReportData, finding: Finding) -> str:
    kind, _ = CAUSE_MARK[finding.cause]
    evidence = "".join(f"<li>{escape(sentence(each))}</li>" for each in finding.evidence)
    why = f"<h3>Evidence</h3><ul>{evidence}</ul>" if evidence else ""
    by_rank = {place.rank: place for place in data.places}
    places = [by_rank[rank] for rank in finding.ranks[:4] if rank in by_rank]
    where = "".join(
        f'<span class="tag">rank {place.rank}: {escape(place_text(place))}</span>' for place in places
    )
    ranks = ",".join(map(str, finding.ranks))
    group = f'<span class="tag">seen in {escape(finding.group)}</span>' if finding.group else ""
    advice = _with_code(next_step(finding, run_ended=data.run_ended, one_host=data.one_host))
    return (
        f'<section class="card {kind}" data-ranks="{ranks}"><h2>{escape(headline(finding))}</h2>'
        f'<p class="cost">Costs <b>{escape(cost(finding, data.seconds_of(finding)))}</b></p>'
        f'<p><span class="tag">{CAUSE_LABEL[finding.cause]}</span>'
        f'<span class="tag">confidence {finding.confidence:.2f}</span>{group}{where}</p>{why}'
        f'<div class="next"><h3>What to do next</h3><p>{advice}</p></div></section>'
    )


def _all_well(data: ReportData) -> str:
    return (
        '<section class="card fine"><h2>No culprit found</h2><p class="cost">No rank, link or group held the '
        f"others up in steps {data.first_step}-{data.last_step} by more than the usual jitter.</p></section>"
    )


def _weak_signals(data: ReportData) -> str:
    """Folded: a reader who looks for a culprit need not see them."""
    if not data.weak_signals:
        return ""
    told = data.weak_signals[:MOST_WEAK]
    shown = "".join(
        f"<li>{escape(weak_signal(each))}<ul>"
        + "".join(f"<li>{escape(sentence(said))}</li>" for said in each.evidence)
        + "</ul></li>"
        for each in told
    )
    if len(told) < len(data.weak_signals):
        shown += f"<li>{len(data.weak_signals) - len(told)} more: see report.json</li>"
    return (
        f'<details class="weak"><summary>Weak signals ({len(data.weak_signals)})</summary>'
        f'<p class="dim">{WEAK_SIGNALS}</p><ul>{shown}</ul></details>'
    )


def _stacks(data: ReportData) -> str:
    if not data.stacks:
        return ""
    shown = "".join(
        f"<h3>rank {rank}</h3><pre>{escape(stack)}</pre>" for rank, stack in list(data.stacks.items())[:8]
    )
    more = "" if len(data.stacks) <= 8 else f'<p class="dim">{len(data.stacks) - 8} more in report.json.</p>'
    return f"<h2>Where the ranks stand</h2>{shown}{more}"


def _steps(data: ReportData) -> str:
    picture = in_both_widths(lambda width: step_times(data, width))
    if not picture:
        return ""
    first, last = data.step_times.steps[0], data.step_times.steps[-1]
    there = any(each.first_step <= last and each.last_step >= first for each in data.findings)
    shaded = " Shaded: the steps of each finding, with its letter of the grid below." if there else ""
    over = cut_off(data)
    cut = f" {over} step{'s are' if over > 1 else ' is'} longer than the picture is high." if over else ""
    return (
        f"<h2>Step time</h2><figure>{picture}<figcaption>Length of each step, from the first rank's begin to "
        f"the last rank's end.{cut}{shaded}</figcaption></figure>"
    )


def _grid(data: ReportData) -> str:
    if not data.places:
        return ""
    legend = f"<figcaption>{grid.legend(data)}</figcaption>"
    return f'<h2>Ranks</h2><figure class="ranks">{grid.grid(data)}{legend}</figure>'


def _timelines(data: ReportData) -> str:
    if not data.excerpts:
        return ""
    places = {place.rank: place for place in data.places}
    lengths: dict[int, int] = {}
    for excerpt in data.excerpts:
        lengths[excerpt.finding] = max(excerpt.length, lengths.get(excerpt.finding, 0))
    parts = []
    for excerpt in data.excerpts:
        picture = in_both_widths(partial(timeline.timeline, excerpt, places, lengths[excerpt.finding]))
        parts.append(f"<h3>{escape(excerpt.title)}</h3><figure>{picture}</figure>")
    return (
        f"<h2>Timeline</h2>{''.join(parts)}{timeline.legend(data.excerpts)}"
        '<p class="dim">All ranks on one clock, the pictures of one finding to one scale. Communication '
        "is drawn over the lower half of the pass it belongs to.</p>"
    )


def _breakdown(data: ReportData) -> str:
    rows = breakdown_rows(data)
    if not rows:
        return ""
    parts = data.breakdown
    bars = in_both_widths(lambda width: breakdown_bars(rows, width))
    which = f"Means over {len(parts.steps)} steps ({parts.steps[0]}-{parts.steps[-1]}), "
    return (
        f"<h2>Where the time goes</h2><figure>{bars}{breakdown_legend(parts.overall)}"
        f"<figcaption>{which}{time_text(parts.seconds * 1e9)} each. For {100 * parts.matched:.0f} % of the "
        "communication the other side's begin is known, which tells waiting from the transfer itself."
        "</figcaption></figure>"
    )


def _clocks(data: ReportData) -> str:
    words = clock_words(data.clocks.reference, data.clocks.one_clock, data.clocks.residual_p99_ns)
    if not words and not data.clocks.notes:
        return ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in data.clocks.notes)
    return f"<h2>Clocks</h2><p>{words}</p>{f'<ul>{notes}</ul>' if notes else ''}"


def _limits(data: ReportData) -> str:
    if not data.notes:
        return ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in limits(data.notes))
    return f"<h2>What limits this report</h2><ul>{notes}</ul>"


def _with_code(text: str) -> str:
    """Text with `code` between backquotes."""
    pieces = escape(text).split("`")
    if len(pieces) % 2 == 0:
        return escape(text)
    return "".join(
        f'<span class="mono">{piece}</span>' if index % 2 else piece for index, piece in enumerate(pieces)
    )
