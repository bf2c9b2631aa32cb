"""The report as one self-contained HTML page: what is wrong first, then the run, layers, experts, limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from mt_megatron.scan.format.run_files import write_private
from mt_megatron.scope.recording.order import place_of
from mt_megatron.scope.sidecar.alerts import FEWEST

from .charts import Marks, chart, heat_map, matrix, number, positions, spark
from .gather import ModuleRow, ReportData
from .style import CSS, SCRIPT

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

MOST_ALERTS = 40

MOST_ROWS = 200
"""Of a table of modules."""

_COLUMNS = (
    *(
        "gradient_norm",
        "activation_rms",
        "update_ratio",
        "weight_norm",
        "residual_growth",
        "outlier_channels",
    ),
    *("attention_entropy", "attention_logit_max", "router_entropy", "expert_load", "embedding_norm"),
    *("activation_max", "not_finite"),
)


def write_report(data: ReportData, path: Path) -> None:
    """Write the page to ``path``; it appears whole or not at all. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, page(data))


def page(data: ReportData) -> str:
    """The whole page. It fetches nothing, and its own policy forbids it to."""
    marks = Marks(
        perturbed=_stretches(sorted({step for step, _ in data.perturbed})),
        alerts=[each.step for each in data.alerts],
        bookmarks=[each.step for each in data.bookmarks],
        sessions=[each.first_step for each in data.facts.sessions[1:] if each.first_step is not None],
    )
    body = [
        _head(data),
        _alerts(data),
        _run(data, marks),
        _maps(data, marks),
        _experts(data, marks),
        _positions(data),
        _modules(data),
        _limits(data),
    ]
    title = f"MegaScope: {data.run}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + f'\n</main><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def _stretches(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Steps in a row as first and last."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and step - found[-1][1] <= 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def _head(data: ReportData) -> str:
    layout = ", ".join(
        f"{name.upper()} {size}"
        for name, size in data.facts.layout.items()
        if isinstance(size, int) and not isinstance(size, bool) and size > 1
    )
    model = ", ".join(
        f"{name} {value}"
        for name, value in data.facts.model.items()
        if value is not None and not isinstance(value, dict)
    )
    world = data.facts.session.world_size
    steps = data.steps.step
    facts = [
        f"{len(data.facts.ranks)} of {world} ranks"
        if len(data.facts.ranks) < world
        else _counted(world, "rank"),
        layout or "no parallelism",
        f"steps {steps[0]}-{steps[-1]}" if len(steps) else "no steps",
    ]
    seconds = data.steps.seconds[np.isfinite(data.steps.seconds)]
    if len(seconds):
        facts.append(f"median step {number(float(np.median(seconds)))} s")
    if len(data.facts.sessions) > 1:
        facts.append(f"{len(data.facts.sessions)} sessions")
    line = escape(" \N{MIDDLE DOT} ".join(facts))
    return f'<h1>{escape(data.run)}</h1><p class="facts">{line}</p><p class="facts">{escape(model)}</p>'


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def _alerts(data: ReportData) -> str:
    cards = []
    broken = data.not_finite
    if broken is not None:
        more = f" {_counted(broken.others, 'further value')} of that step." if broken.others else ""
        cards.append(
            f'<section class="card bad"><h2>First value that is not finite: step {broken.step}, '
            f"{escape(broken.path or 'the whole model')}</h2><p>{escape(broken.statistic)}.{more} Look at "
            "this module's input and weights at the step before.</p></section>"
        )
    if data.alerts:
        shown = "".join(
            f"<li>step {each.step}: {escape(each.text)}</li>" for each in data.alerts[:MOST_ALERTS]
        )
        if len(data.alerts) > MOST_ALERTS:
            shown += f"<li>{len(data.alerts) - MOST_ALERTS} more: RUN/scope/alerts.jsonl</li>"
        cards.append(
            f'<section class="card bad"><h2>{_counted(len(data.alerts), "alert")}</h2><ul>{shown}</ul>'
            "</section>"
        )
    if not cards:
        text = "No statistic was seen outside its band."
        if data.samples < FEWEST:
            text = f"A statistic has a band from its {FEWEST + 1}th sample on; the run has {data.samples}."
        cards.append(f'<section class="card"><h2>No alerts</h2><p>{text}</p></section>')
    return "".join(cards)


def _run(data: ReportData, marks: Marks) -> str:
    step = data.steps.step
    pictures = [
        ("loss", "Loss", data.steps.loss, False),
        ("grad_norm", "Gradient norm before clipping, logarithmic", data.steps.grad_norm, True),
        ("lr", "Learning rate", data.steps.lr, False),
        ("tokens/s", "Tokens per second", data.steps.tokens_per_second, False),
        ("memory", "Memory of the rank with most, GiB", data.steps.memory_bytes / 2**30, False),
    ]
    parts = ["<h2>Run</h2>"]
    for name, title, values, logarithmic in pictures:
        height = 210 if name == "loss" else 120
        also = data.validation if name == "loss" else None
        picture = chart(step, values, name, marks, height=height, logarithmic=logarithmic, also=also)
        if picture:
            if also is not None:
                title += f"; dashed: validation loss, last {number(float(also.value[-1]))} nats per token"
            parts.append(f"<h3>{escape(title)}</h3><figure>{picture}</figure>")
    legend = ["triangles: not finite"]
    legend += ["dashed lines: alerts"] * bool(marks.alerts)
    legend += ["shaded: under a perturbation"] * bool(marks.perturbed)
    legend += ["solid lines: bookmarks"] * bool(marks.bookmarks)
    legend += ["long dashes: resumed or rewound"] * bool(marks.sessions)
    parts.append(f'<p class="dim">{"; ".join(legend).capitalize()}.</p>')
    parts += [
        f'<p class="dim">Bookmark at step {each.step}: {escape(each.text)}</p>' for each in data.bookmarks
    ]
    texts: dict[str, list[int]] = {}
    for at, text in data.perturbed:
        texts.setdefault(text, []).append(at)
    parts += [
        f'<p class="dim">Perturbed, steps {min(steps)}-{max(steps)}: {escape(text)}</p>'
        for text, steps in texts.items()
    ]
    return "".join(parts)


def _maps(data: ReportData, marks: Marks) -> str:
    parts = []
    for each in data.maps:
        picture = heat_map(each, marks)
        if picture:
            parts.append(
                f"<h3>{escape(each.title)}</h3><figure>{picture}"
                f"<figcaption>{escape(each.meaning)}</figcaption></figure>"
            )
    if not parts:
        return ""
    return "<h2>Layers by step</h2>" + "".join(parts)


def _experts(data: ReportData, marks: Marks) -> str:
    experts = data.experts
    if experts is None:
        return ""
    rows = [path if (place := place_of(path)) is None else place[1] for path in experts.paths]
    picture = matrix(experts.share, rows, "tokens of each expert").replace(
        "data-rows", 'data-words="layer {r}, expert {c}" data-rows', 1
    )
    parts = [
        f"<h2>Experts</h2><h3>Tokens over the mean, by layer and expert, step {experts.step}</h3>"
        f"<figure>{picture}</figure>"
    ]
    for title, line in (
        ("Experts without a token, all layers", experts.dead),
        ("Experts with more than twice the mean, all layers", experts.overloaded),
    ):
        picture = chart(line.step, line.value, title, marks, height=110)
        if picture:
            parts.append(f"<h3>{title}</h3><figure>{picture}</figure>")
    return "".join(parts)


def _positions(data: ReportData) -> str:
    picture = positions(data.positions)
    if not picture:
        return ""
    first, last = data.positions[0][0], data.positions[-1][0]
    about = f"Step {last}" + (f"; dashed: step {first}" if first != last else "")
    return f"<h2>Loss by position</h2><figure>{picture}<figcaption>{about}.</figcaption></figure>"


def _modules(data: ReportData) -> str:
    if not data.modules:
        return ""
    layers = [
        row for row in data.modules if place_of(row.path) is None or row.path.rpartition(".")[2].isdigit()
    ]
    others = [row for row in data.modules if row not in layers]
    parts = ["<h2>Modules</h2>", _table(layers)]
    if others:
        parts.append(
            f"<details><summary>{_counted(len(others), 'module')} within layers</summary>{_table(others)}"
            "</details>"
        )
    return "".join(parts)


def _table(rows: Sequence[ModuleRow]) -> str:
    columns = [name for name in _COLUMNS if any(name in row.lines for row in rows)]
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in columns)
    body = "".join(_cells(rows[:MOST_ROWS], columns))
    more = f'<p class="dim">{len(rows) - MOST_ROWS} more modules</p>' if len(rows) > MOST_ROWS else ""
    return f'<div class="scroll"><table><tr><th>module</th>{head}</tr>{body}</table></div>{more}'


def _cells(rows: Sequence[ModuleRow], columns: Sequence[str]) -> Iterator[str]:
    for row in rows:
        cells = "".join(f"<td>{spark(row.lines[name]) if name in row.lines else ''}</td>" for name in columns)
        name = escape(row.path or "whole model")
        about = f' title="{escape(row.class_name)}"' if row.class_name else ""
        yield f'<tr><td class="path"{about}>{name}</td>{cells}</tr>'


def _limits(data: ReportData) -> str:
    found = []
    missing = data.facts.session.missing_ranks
    if missing:
        found.append(
            f"{_counted(missing, 'rank')} of {data.facts.session.world_size} sent nothing: values may "
            "lack their parts."
        )
    if data.partial:
        found.append(f"{data.partial:,} of {data.values:,} values lack parts of ranks.")
    found += [
        f"{each.frames:,} frames ({each.bytes / 2**20:.1f} MiB) of rank {each.rank} were dropped by the "
        f"{each.source}, session {each.session}."
        for each in data.dropped
    ]
    kinds: dict[str, int] = {}
    for each in data.thinned:
        kinds[each.kind] = kinds.get(each.kind, 0) + each.steps
    found += [f"Retention removed {kind} of {count:,} steps." for kind, count in kinds.items()]
    if not found:
        return ""
    return (
        "<h2>What limits this report</h2><ul>"
        + "".join(f"<li>{escape(line)}</li>" for line in found)
        + "</ul>"
    )
