"""The module tree with small curves, where the first NaN was, where two runs part, and the experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..source import Source
from .context import Answer, Context, extremes

_LOADS = "expert_load"

TOLERANCE = 1e-3
"""Relative difference between values of two runs that counts as none."""


def model(context: Context, query: dict[str, Any]) -> Answer:
    """Every module with the curve of one statistic where it has one: values [modules with it, points] beside
    their steps, of which the first ``points`` of a row are its own and the last of these its newest; and the
    first step at which it had values that are not finite."""
    source, statistic = context.source, query["statistic"]
    names = source.statistics()
    listed = {module.path: module for module in source.modules()}
    order = [*listed, *(path for path in names if path not in listed)]
    rows: list[dict[str, Any]] = []
    curves: list[NDArray[np.float64]] = []
    at: list[NDArray[np.int64]] = []
    for path in order:
        module = listed.get(path)
        row: dict[str, Any] = {
            "path": path,
            "class": module.class_name if module else "",
            "parameters": module.parameters if module else 0,
            "statistics": list(names.get(path, ())),
            "first_not_finite": _first_not_finite(source, path, names.get(path, ())),
        }
        if statistic in row["statistics"]:
            steps, values = source.series(path, statistic)
            keep = extremes(values, query["points"])
            row["curve"] = len(curves)
            row["points"] = len(keep)
            curves.append(values[keep])
            at.append(steps[keep])
        rows.append(row)
    width = max((len(each) for each in curves), default=0)
    values = np.full((len(curves), width), np.nan, np.float32)
    steps_of = np.full((len(curves), width), np.nan)
    for index, (curve, steps) in enumerate(zip(curves, at, strict=True)):
        values[index, : len(curve)] = curve
        steps_of[index, : len(curve)] = steps
    known = [row for row in rows if row["first_not_finite"] is not None]
    first = min(known, key=lambda row: row["first_not_finite"], default=None)
    return Answer(
        facts={
            "statistic": statistic,
            "rows": rows,
            "first_not_finite": first and {"path": first["path"], "step": first["first_not_finite"]},
        },
        arrays={"values": values, "steps": steps_of},
    )


def _first_not_finite(source: Source, path: str, names: Any) -> int | None:
    if "not_finite" not in names:
        return None
    steps, values = source.series(path, "not_finite")
    bad = np.flatnonzero(~(values == 0) & ~np.isnan(values))
    return int(steps[bad[0]]) if len(bad) else None


def parted(context: Context, query: dict[str, Any]) -> Answer:
    """First step at which one statistic differs from that of the run ``other`` by more than ``TOLERANCE``;
    of the modules that differ there the first in the order of the model, and ``values`` of this run and of
    the other. Every recorded step that both runs have is compared; curves are thinned."""
    source, other, statistic = context.source, query["other"].source, query["statistic"]
    ours, theirs = source.statistics(), other.statistics()
    first: int | None = None
    path, pair, steps, modules = "", np.zeros(0), np.zeros(0, np.int64), 0
    for each in dict.fromkeys([*(module.path for module in source.modules()), *ours]):
        if statistic not in ours.get(each, ()) or statistic not in theirs.get(each, ()):
            continue
        at, values = source.series(each, statistic)
        other_at, other_values = other.series(each, statistic)
        common, left, right = np.intersect1d(at, other_at, return_indices=True)
        modules += 1
        if not np.array_equal(common, steps):
            steps = np.union1d(steps, common)
        found = np.flatnonzero(differs(values[left], other_values[right]))
        if len(found) and (first is None or int(common[found[0]]) < first):
            first, path = int(common[found[0]]), each
            pair = np.array([values[left[found[0]]], other_values[right[found[0]]]])
    return Answer(
        facts={"step": first, "path": path, "steps": len(steps), "modules": modules}, arrays={"values": pair}
    )


def differs(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where ``report.compare.difference`` exceeds ``TOLERANCE``: NaN equals NaN, and a value that is not
    finite differs from every other."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):  # infinity less infinity
        apart = np.abs(a - b) > TOLERANCE * np.maximum(np.abs(a), np.abs(b))
    found: NDArray[np.bool_] = ~same & (apart | ~np.isfinite(a) | ~np.isfinite(b))
    return found


def experts(context: Context, query: dict[str, Any]) -> Answer:
    """Tokens of each expert of every router at the last record up to ``step``, and what the other statistics
    of the router were then."""
    source = context.source
    paths = [path for path, names in source.statistics().items() if _LOADS in names]
    rows, loads = [], []
    for path in paths:
        at, vectors = source.vectors(path, _LOADS)
        until = len(at) if query["step"] is None else int(np.searchsorted(at, query["step"], "right"))
        if until == 0:
            continue
        row: dict[str, Any] = {"path": path, "step": int(at[until - 1])}
        for name in ("router_entropy", "dead_experts", "overloaded_experts", _LOADS):
            if name in source.statistics()[path]:
                steps, values = source.series(path, name)
                last = int(np.searchsorted(steps, at[until - 1], "right")) - 1
                row[name] = float(values[last]) if last >= 0 else None
        rows.append(row)
        loads.append(vectors[until - 1])
    width = max((len(each) for each in loads), default=0)
    table = np.full((len(loads), width), np.nan, np.float32)
    for index, each in enumerate(loads):
        table[index, : len(each)] = each
    return Answer(facts={"rows": rows}, arrays={"loads": table})
