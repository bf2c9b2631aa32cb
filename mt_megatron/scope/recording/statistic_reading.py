"""Statistics out of the files of all nodes: parts of several nodes combine like those of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ScopeError
from mt_megatron.scope.format.statistics import DERIVED, STATISTICS, Part, combined

from .combining import number
from .data import Floats, Series, Session, Value
from .node import NodeFile

Range = tuple[NodeFile, int, Session, int, int]
"""Node, its number of a session, the session, first and last step to read there."""


def series_of(
    path: str,
    statistic: str,
    ranges: Iterable[Range],
    sessions: Mapping[int, Session],
    marks: set[tuple[int, int]],
    *,
    vectors: bool,
) -> Series:
    """``Recording.series`` over ``ranges``; ``marks``: (step, session) under a perturbation."""
    _known(statistic)
    rows: dict[tuple[int, int], list[tuple[int, float, bytes | None]]] = {}
    of: dict[int, int] = {}
    source = DERIVED.get(statistic)
    for node, own, each, low, high in ranges:
        entry = node.entry(path, statistic)
        if entry is None:
            continue
        wanted = entry if source is None else node.entry(path, source)
        of[each.number] = of.get(each.number, 0) + sum(ranks for _, ranks in node.expected(each, entry))
        for step, parts, value, part in node.rows(
            "SELECT value.step, parts, number, ifnull(value.part, vector.part) FROM value "
            "LEFT JOIN vector ON vector.entry=:v AND vector.session=value.session "
            "AND vector.step=value.step "
            "WHERE value.entry=:e AND value.session=:s AND value.step BETWEEN :l AND :h",
            {"e": entry, "v": wanted, "s": own, "l": low, "h": high},
        ):
            rows.setdefault((step, each.number), []).append((parts, number_of(value), part))
    keys = sorted(rows)
    found = [_merge(statistic, rows[key], vectors) for key in keys]
    # Several nodes' numbers without their parts make no number: retention has removed the vectors.
    kept = [index for index, each in enumerate(found) if each is not None]
    keys, merged = [keys[index] for index in kept], [each for each in found if each is not None]
    parts = np.asarray([each[0] for each in merged], np.int64)
    whole = np.asarray([of[key[1]] for key in keys], np.int64)
    missing = np.asarray([sessions[key[1]].missing_ranks > 0 for key in keys], np.bool_)
    return Series(
        path=path,
        statistic=statistic,
        step=np.asarray([key[0] for key in keys], np.int64),
        session=np.asarray([key[1] for key in keys], np.int64),
        value=np.asarray([each[1] for each in merged], np.float64),
        parts=parts,
        of=whole,
        partial=(parts < whole) | missing,
        perturbed=are_marked(keys, marks),
        vector=_stacked([each[2] for each in merged]) if vectors else None,
    )


def values_of(
    step: int, ranges: Iterable[Range], statistics: Iterable[str], *, vectors: bool
) -> tuple[Value, ...]:
    """``Recording.values`` over ``ranges``."""
    wanted = set(statistics)
    for name in wanted:
        _known(name)
    rows: dict[tuple[str, str], list[tuple[int, float, bytes | None]]] = {}
    of: dict[tuple[str, str], int] = {}
    missing = False
    for node, own, each, *_ in ranges:
        missing = missing or each.missing_ranks > 0
        # Values first: an entry that is declared while this reads is then known below.
        here = node.rows(
            "SELECT entry.id, parts, number, part FROM entry JOIN value ON value.entry = entry.id "
            "AND value.session=? AND value.step=?",
            (own, step),
        )
        long = dict(
            node.rows(
                "SELECT entry.id, part FROM entry JOIN vector ON vector.entry = entry.id "
                "AND vector.session=? AND vector.step=?",
                (own, step),
            )
        )
        declared = node.expected(each)
        names = {
            entry: (path, statistic)
            for entry, path, statistic in node.rows(
                "SELECT entry.id, text, statistic FROM entry JOIN path ON path.id = entry.path"
            )
        }
        sources = {
            (path, statistic): node.entry(path, DERIVED[statistic])
            for path, statistic in names.values()
            if statistic in DERIVED
        }
        # A node that has not written this step yet counts, too: what the others have is a part.
        for entry, ranks in declared:
            of[names[entry]] = of.get(names[entry], 0) + ranks
        for entry, parts, value, part in here:
            key = names[entry]
            if key[1] not in wanted:
                continue
            kept = part if part is not None else long.get(sources.get(key, entry))
            rows.setdefault(key, []).append((parts, number_of(value), kept))
    found = []
    for key in sorted(rows):
        merged = _merge(key[1], rows[key], vectors)
        if merged is not None:
            found.append(
                Value(
                    path=key[0],
                    statistic=key[1],
                    value=merged[1],
                    parts=merged[0],
                    of=of.get(key, 0),
                    partial=missing or merged[0] < of.get(key, 0),
                    vector=merged[2],
                )
            )
    return tuple(found)


def _known(statistic: str) -> None:
    if statistic not in STATISTICS:
        raise ScopeError(f"there is no statistic {statistic!r}; expected one of {', '.join(STATISTICS)}")


def number_of(value: float | None) -> float:
    """NaN for NULL, as which SQLite keeps NaN."""
    return float("nan") if value is None else float(value)


def are_marked(keys: list[tuple[int, int]], marks: set[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which of ``keys``, (step, session), are in ``marks``."""
    return np.asarray([key in marks for key in keys], np.bool_)


def _merge(
    statistic: str, rows: list[tuple[int, float, bytes | None]], vectors: bool
) -> tuple[int, float, Floats | None] | None:
    """Parts that came, number and vector of the nodes' rows (parts, number, combined part); None where
    several nodes have numbers of which the parts are gone."""
    parts = sum(row[0] for row in rows)
    kept: list[Part] = [np.frombuffer(row[2], "<f8") for row in rows if row[2] is not None]
    if len(kept) < len(rows):
        return (parts, rows[0][1], None) if len(rows) == 1 else None
    source = DERIVED.get(statistic, statistic)
    part = kept[0] if len(kept) == 1 else combined(source, kept)
    value = rows[0][1] if len(rows) == 1 else number(statistic, part)
    of = STATISTICS[statistic].vector
    with np.errstate(all="ignore"):
        return parts, value, of(part) if vectors and of is not None else None


def _stacked(vectors: list[Floats | None]) -> Floats | None:
    longest = max((len(each) for each in vectors if each is not None), default=0)
    if not longest:
        return None
    found = np.full((len(vectors), longest), np.nan)
    for row, each in zip(found, vectors, strict=True):
        if each is not None:
            row[: len(each)] = each
    return found
