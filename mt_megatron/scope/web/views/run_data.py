"""The run as a whole: who it is, its steps, single series and vectors, alerts and what is missing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scope.format.statistics import STATISTICS

from ..source import STEP_COLUMNS
from .context import Answer, Context, extremes, thinned


def run(context: Context, query: dict[str, Any]) -> Answer:
    """Facts, modules' statistics, and what can be shown."""
    source = context.source
    steps = source.steps()
    numbers = steps["i"]
    return Answer(
        facts={
            "facts": dict(source.facts()),
            "revision": source.revision(),
            "first": int(numbers[0]) if len(numbers) else None,
            "last": int(numbers[-1]) if len(numbers) else None,
            "count": len(numbers),
            "statistics": {
                each.name: {"unit": each.unit, "meaning": each.meaning} for each in STATISTICS.values()
            },
            "names": {path: list(names) for path, names in source.statistics().items()},
            "modules": len(source.modules()),
            "dropped": asdict(source.dropped()),
            "bookmarks": [asdict(mark) for mark in source.bookmarks()],
            "trace": context.folder is not None and (context.folder / "scan").is_dir(),
        }
    )


def steps(context: Context, query: dict[str, Any]) -> Answer:
    """Columns of the step table, and the tokens of all recorded steps up to each; of long runs the extremes
    of the loss in each stretch."""
    table = context.source.steps()
    loss = np.asarray(table["loss"], np.float64)
    keep = extremes(loss, query["points"])
    arrays: dict[str, NDArray[Any]] = {"i": np.asarray(table["i"], np.int64)[keep]}
    for name in STEP_COLUMNS:
        arrays[name] = np.asarray(table[name], np.float64)[keep]
    arrays["tokens_seen"] = np.nancumsum(np.asarray(table["tokens"], np.float64))[keep]
    arrays["perturbed"] = np.asarray(table["perturbed"], np.uint8)[keep]
    evaluated = "validation_loss" in context.source.statistics().get("", ())
    return Answer(facts={"count": len(loss), "evaluated": evaluated}, arrays=arrays)


def series(context: Context, query: dict[str, Any]) -> Answer:
    """One statistic over the steps."""
    at, values = context.source.series(query["path"] or "", query["statistic"])
    keep = extremes(values, query["points"])
    return Answer(facts={"count": len(at)}, arrays={"i": at[keep], "values": values[keep]})


def vectors(context: Context, query: dict[str, Any]) -> Answer:
    """A statistic's vectors over the steps, as a matrix [steps, length]."""
    at, values = context.source.vectors(query["path"] or "", query["statistic"])
    first, last = query["first"], query["last"]
    keep = np.ones(len(at), bool)
    if first is not None:
        keep &= at >= first
    if last is not None:
        keep &= at <= last
    at, values = at[keep], values[keep]
    thin = thinned(at, query["points"])
    return Answer(
        facts={"count": len(at)}, arrays={"i": at[thin], "values": np.asarray(values[thin], np.float32)}
    )


def alerts(context: Context, query: dict[str, Any]) -> Answer:
    """Alerts, the newest 500."""
    found = context.source.alerts()
    rows = [asdict(each) for each in found[-500:]]
    return Answer(facts={"alerts": rows, "count": len(found)})
