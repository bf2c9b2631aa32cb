"""The comparison for people (Markdown) and for programs (JSON)."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from .compare import Comparison, Entry
from .pieces import PHASES
from .side import Side

_AROUND = 6
_QUIET, _RISE = 0.02, 8.0


def as_json(comparison: Comparison, a: Side, b: Side) -> dict[str, Any]:
    """Everything, as plain data. What is not finite is a string, ``inf`` or ``nan``: JSON has no such
    numbers."""
    first = comparison.first
    document: dict[str, Any] = _finite(
        {
            "equal": first is None,
            "suspect": comparison.suspect(),
            "first": None if first is None else _plain(first),
            "sides": {side.name: asdict(side) for side in (a, b)},
            "ranks": {"a": asdict(comparison.facts_a), "b": asdict(comparison.facts_b)},
            "only_a": comparison.only_a,
            "only_b": comparison.only_b,
            "not_compared": comparison.not_placed,
            "notes": comparison.notes,
            "jump": jump(comparison),
            "entries": [_plain(entry) for entry in comparison.entries],
        }
    )
    return document


def _plain(entry: Entry) -> dict[str, Any]:
    return {**asdict(entry), "differs": entry.differs, "equal_to_the_bit": entry.equal}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def verdict(comparison: Comparison) -> str:
    """One line."""
    first = comparison.first
    compared = len(comparison.entries)
    if first is None:
        equal = sum(entry.equal for entry in comparison.entries)
        return f"no difference beyond rounding in {compared} tensors; {equal} are equal to the bit"
    where = f" ({first.where})" if first.where else ""
    line = (
        f"first difference: {first.phase} of {first.name}, error {first.error:.3g} where "
        f"{first.tolerance:.3g} is rounding{where}"
    )
    if first.note:
        line += f"; {first.note}"
    if comparison.suspect() != first.name:
        line += f"; that gradient is computed by {comparison.suspect()}"
    return line


def jump(comparison: Comparison) -> str | None:
    """Where the error of the outputs rises most when nothing is more than rounding: what to look at when
    a limit that suits a whole network is too wide for one module. None without such a rise."""
    highest, found = 0.0, None
    for entry in comparison.entries if comparison.first is None else ():
        if entry.phase != "forward":
            continue
        # Rounding of the first sums, from 0 to something, is no rise.
        before = max(highest, entry.tolerance * _QUIET)
        if entry.error > _RISE * before and (found is None or entry.error / before > found[0]):
            found = entry.error / before, entry, before
        highest = max(highest, entry.error)
    if found is None:
        return None
    rise, entry, before = found
    return (
        f"the error rises {rise:.0f}-fold at {entry.name}, from at most {before:.2g} to {entry.error:.2g}, "
        f"which is within {entry.tolerance:.2g}; --tolerance sets another limit"
    )


def as_markdown(comparison: Comparison, a: Side, b: Side, picture: str) -> str:
    """The verdict, the tensors around the first difference, and the largest error of every phase."""
    lines = [
        "# Divergence report",
        "",
        f"**{_sentence(verdict(comparison))}**",
        "",
        f"![error per module]({picture})",
    ]
    lines += [
        "",
        "| side | backend | processes | dtype | loss | device | options |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, facts in ((a, comparison.facts_a), (b, comparison.facts_b)):
        loss = "none" if facts.loss is None else f"{facts.loss:.6f}"
        lines.append(
            f"| {side.name} | {side.backend} | {side.processes} | {facts.dtype} | {loss} | {facts.device} | "
            f"`{' '.join(side.arguments)}` |"
        )
    lines += ["", "## Phases", "", "| phase | tensors | equal to the bit | differ | largest error |"]
    lines.append("|---|---|---|---|---|")
    for phase in PHASES:
        entries = [entry for entry in comparison.entries if entry.phase == phase]
        if entries:
            worst = max(entries, key=lambda entry: entry.error)
            lines.append(
                f"| {phase} | {len(entries)} | {sum(e.equal for e in entries)} | "
                f"{sum(e.differs for e in entries)} | {worst.error:.3g} at {worst.name} |"
            )
    first = comparison.first
    if first is not None:
        at = comparison.entries.index(first)
        nearby = comparison.entries[max(0, at - _AROUND) : at + _AROUND + 1]
        lines += ["", "## Around the first difference", ""]
        lines += [
            "| | phase | tensor | error | rounding | norm a | norm b | note |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for entry in nearby:
            mark = "**first**" if entry is first else "differs" if entry.differs else ""
            lines.append(
                f"| {mark} | {entry.phase} | {entry.name} | {entry.error:.3g} | {entry.tolerance:.3g} | "
                f"{entry.norm_a:.6g} | {entry.norm_b:.6g} | {entry.note or entry.where} |"
            )
    for title, names in (
        ("Only on side a", comparison.only_a),
        ("Only on side b", comparison.only_b),
        ("Not compared: the place of their output in the whole is not known", comparison.not_placed),
        ("Notes", [*comparison.notes, *filter(None, [jump(comparison)])]),
    ):
        if names:
            lines += ["", f"## {title}", "", *(f"- {name}" for name in names)]
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
