"""The module tree with small curves, where the first NaN was, and the experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..source import Source
from .context import Answer, Context, extremes

_LOADS = "expert_load"


def model(context: Context, query: dict[str, Any]) -> Answer:
    """Every module with the curve of one statistic where it has one: values [modules with it, points] beside
    their steps, and the first step at which it had values that are not finite."""
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
            row["last"] = float(values[-1]) if len(values) else None
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
