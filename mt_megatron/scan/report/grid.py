"""The ranks of a run as an SVG grid, DP x PP x TP, coloured and lettered by verdict."""

from __future__ import annotations

from html import escape

from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.findings.text import CAUSE_LABEL, place_text

from .data import ReportData
from .style import CAUSE_MARK

_LEFT, _TOP = 110, 34
_MOST_COLUMNS = 64
_WIDTH = 1060
_WIDEST, _FEWEST = 96, 10


def grid(data: ReportData) -> str:
    """A column per data-parallel (and context-parallel) place, a band per pipeline stage, in it a row per
    tensor-parallel rank. Very wide layouts are folded at 64 columns."""
    columns = sorted({(place.dp, place.cp) for place in data.places})
    rows = sorted({(place.pp, place.tp) for place in data.places})
    at_column = {key: index for index, key in enumerate(columns)}
    at_row = {key: index for index, key in enumerate(rows)}
    folds = -(-len(columns) // _MOST_COLUMNS)
    shown = min(len(columns), _MOST_COLUMNS)
    # Few ranks get wide cells: the grid then fills its half of the page.
    size = max(14, min(_WIDEST, (_WIDTH - _LEFT) // max(_FEWEST, shown)))
    height = min(size, 34)
    stages = sorted({pp for pp, _ in rows})
    gap = 8 if len(stages) > 1 else 0
    fold_height = len(rows) * height + (len(stages) - 1) * gap + 30

    def corner(place: Place) -> tuple[int, int]:
        column, row = at_column[place.dp, place.cp], at_row[place.pp, place.tp]
        y = _TOP + (column // _MOST_COLUMNS) * fold_height + row * height + stages.index(place.pp) * gap
        return _LEFT + (column % _MOST_COLUMNS) * size, y

    parts = [*_column_names(columns, size, folds, fold_height), *_row_names(rows, stages, height, gap)]
    verdicts = data.verdicts
    labels: list[str] = []
    centres: dict[int, tuple[float, float]] = {}
    for place in data.places:
        x, y = corner(place)
        centres[place.rank] = (x + size / 2, y + height / 2)
        cause = verdicts.get(place.rank)
        kind, letter = CAUSE_MARK[cause] if cause else ("", "")
        state = kind or ("absent" if place.rank in data.missing or place.rank in data.ended else "")
        words = CAUSE_LABEL[cause] if cause else _unblamed(data, place.rank)
        parts.append(
            f'<rect class="cell {state}" data-rank="{place.rank}" x="{x}" y="{y}" width="{size}" '
            f'height="{height}" data-t="{escape(_about(place, words))}"/>'
        )
        label = f"{place.rank} {letter}" if letter and size >= 34 else letter
        if not letter and size >= 26:
            label = str(place.rank)
        if label:
            cls = f"on {kind}" if kind else "dim"
            labels.append(
                f'<text class="{cls}" x="{x + size / 2:.0f}" y="{y + height / 2 + 4:.0f}" '
                f'text-anchor="middle" pointer-events="none">{label}</text>'
            )
    # Numbers over the lines that join the ends of slow links.
    parts += [*_links(data, centres), *labels]
    width = max(_LEFT + shown * size + 4, 420)
    return (
        f'<svg id="ranks" viewBox="0 0 {width} {_TOP + folds * fold_height}" width="{width}" role="img" '
        f'aria-label="Ranks by verdict">{"".join(parts)}</svg>'
    )


def legend(data: ReportData) -> str:
    """Only what the grid shows."""
    entries = []
    for cause in dict.fromkeys(data.verdicts.values()):
        kind, letter = CAUSE_MARK[cause]
        entries.append((kind, letter, CAUSE_LABEL[cause]))
    entries.append(("", "", "nothing found"))
    if data.missing or data.ended:
        names = ["left no trace"] * bool(data.missing) + ["no longer recorded"] * bool(data.ended)
        entries.append(("absent", "", ", or ".join(names)))
    shown = [
        f'<span><svg viewBox="0 0 16 14"><rect class="cell {kind}" width="16" height="14"/>'
        f'<text class="on {kind}" x="8" y="11.5" text-anchor="middle">{letter}</text></svg>{text}</span>'
        for kind, letter, text in entries
    ]
    return f'<div class="legend">{"".join(shown)}</div>'


def _unblamed(data: ReportData, rank: int) -> str:
    if rank in data.missing:
        return "left no trace"
    return data.ended.get(rank, "nothing found")


def _about(place: Place, words: str) -> str:
    host = f"\n{place.host}" if place.host else ""
    return f"rank {place.rank}: {words}\n{place_text(place)}{host}"


def _column_names(columns: list[tuple[int, int]], size: int, folds: int, fold_height: int) -> list[str]:
    with_cp = len({cp for _, cp in columns}) > 1
    # Names that touch are no names: every other, or every eighth.
    every = next(each for each in (1, 2, 4, 8, 16) if each * size >= (52 if with_cp else 30) or each == 16)
    parts = []
    for fold in range(folds):
        y = _TOP + fold * fold_height - 8
        part = columns[fold * _MOST_COLUMNS : (fold + 1) * _MOST_COLUMNS]
        for index, (dp, cp) in enumerate(part):
            if index % every == 0:
                name = f"dp {dp} cp {cp}" if with_cp else (f"dp {dp}" if size * every >= 40 else str(dp))
                x = _LEFT + index * size + size / 2
                parts.append(f'<text class="dim" x="{x:.0f}" y="{y}" text-anchor="middle">{name}</text>')
        if not with_cp and size * every < 40:
            parts.append(f'<text class="dim" x="{_LEFT - 12}" y="{y}" text-anchor="end">dp</text>')
    return parts


def _row_names(rows: list[tuple[int, int]], stages: list[int], height: int, gap: int) -> list[str]:
    parts = []
    tensor_ranks = len({tp for _, tp in rows})
    for stage in stages:
        members = [index for index, (pp, _) in enumerate(rows) if pp == stage]
        top = _TOP + members[0] * height + stages.index(stage) * gap
        middle = top + len(members) * height / 2 + 4
        parts.append(f'<text x="{_LEFT - 58}" y="{middle:.0f}" text-anchor="end">stage {stage}</text>')
        if tensor_ranks > 1 and height >= 14:
            for index in members:
                y = top + (index - members[0]) * height + height / 2 + 4
                name = f"tp {rows[index][1]}"
                parts.append(
                    f'<text class="dim" x="{_LEFT - 10}" y="{y:.0f}" text-anchor="end">{name}</text>'
                )
    return parts


def _links(data: ReportData, centres: dict[int, tuple[float, float]]) -> list[str]:
    parts = []
    for finding in data.findings:
        ends = [centres[rank] for rank in finding.ranks if rank in centres]
        if finding.cause == "slow_link" and len(ends) == 2:
            (x1, y1), (x2, y2) = ends
            # Bent, so that it does not hide the ranks between its ends.
            bend = 26 if abs(x1 - x2) > abs(y1 - y2) else 0
            side = 26 if not bend else 0
            path = (
                f"M{x1:.0f} {y1:.0f}Q{(x1 + x2) / 2 + side:.0f} {(y1 + y2) / 2 - bend:.0f} {x2:.0f} {y2:.0f}"
            )
            parts.append(f'<path class="edge" d="{path}" pointer-events="none"/>')
    return parts
