"""Data of the report, out of a recording: series in few enough points, heat maps, experts, first NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mt_megatron.scope.format.statistics import STATISTICS
from mt_megatron.scope.recording.data import (
    AlertRecord,
    Dropped,
    Facts,
    Floats,
    Integers,
    Series,
    Steps,
    Thinned,
)
from mt_megatron.scope.recording.files import Bookmark
from mt_megatron.scope.recording.order import place_of
from mt_megatron.scope.recording.reader import Recording

MOST_COLUMNS = 160
"""Of a heat map, each of one or several steps."""

MOST_POINTS = 48
"""Of a line beside a module's name."""

IN_MAPS = (
    "gradient_norm",
    "activation_rms",
    "update_ratio",
    "weight_norm",
    "residual_growth",
    "outlier_channels",
    "activation_max",
    "attention_entropy",
    "attention_logit_max",
    "router_entropy",
    "expert_load",
)
"""Statistics with a heat map layer x step, in this order."""


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """One statistic of the modules of one kind, by layer and step."""

    title: str
    meaning: str
    rows: tuple[str, ...]
    """Labels, first layer first."""

    first: Integers
    last: Integers
    """First and last step of each column."""

    values: Floats
    """[rows, columns]: medians over a column's steps; NaN: no value; infinite: one was not finite."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One module's statistic in few points."""

    step: Integers
    value: Floats
    partial: int
    """Steps whose value lacks parts."""


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One module's statistics."""

    path: str
    class_name: str
    lines: Mapping[str, Line]
    """By statistic."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Tokens of each expert by layer, of the last sample and over the run."""

    paths: tuple[str, ...]
    step: int
    share: Floats
    """[layers, experts]: of the layer's tokens, times the experts; 1 is even, NaN: there are fewer."""

    dead: Line
    """Experts without a token, of all layers."""

    overloaded: Line


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """Place of the first value that is not finite."""

    step: int
    path: str
    statistic: str
    others: int
    """Further values of the same step."""


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """The report as plain values."""

    run: str
    facts: Facts
    steps: Steps
    validation: Line | None
    """Mean loss of the validation data after the steps that were evaluated; None: there was no evaluation."""

    perturbed: tuple[tuple[int, str], ...]
    bookmarks: tuple[Bookmark, ...]
    alerts: tuple[AlertRecord, ...]
    not_finite: NotFinite | None
    maps: tuple[HeatMap, ...]
    modules: tuple[ModuleRow, ...]
    experts: Experts | None
    positions: tuple[tuple[int, Floats], ...]
    """Step and loss by stretch of the sequence, first and last."""

    dropped: tuple[Dropped, ...]
    thinned: tuple[Thinned, ...]
    partial: int
    """Values that lack parts."""

    values: int

    samples: int
    """Steps with statistics, of the whole run."""


def gathered(recording: Recording, *, first: int = 0, last: int | None = None) -> ReportData:
    """Everything that the page shows about steps ``first`` to ``last``. Raises ``ScopeError``."""
    until = 2**62 if last is None else last
    facts = recording.facts()
    order = {each.path: (index, each.class_name) for index, each in enumerate(recording.modules())}
    series: dict[tuple[str, str], Series] = {}
    for name in recording.names():
        found = recording.series(name.path, name.statistic, first=first, last=until)
        if len(found.step):
            series[name.path, name.statistic] = found
    # A module that is no module, as the whole model, comes last.
    paths = sorted({path for path, _ in series}, key=lambda path: order.get(path, (len(order), ""))[0])
    rank = {path: index for index, path in enumerate(paths)}
    steps = recording.steps(first, until)
    shown = {key: each.only_whole() for key, each in series.items() if each.whole.any()}
    return ReportData(
        run=str(recording.files.root.resolve().parent),
        facts=facts,
        steps=steps,
        validation=_validation(shown.get(("", "validation_loss"))),
        perturbed=tuple(each for each in recording.perturbed() if first <= each[0] <= until),
        bookmarks=tuple(each for each in recording.bookmarks() if first <= each.step <= until),
        alerts=tuple(each for each in recording.alerts(current=True) if first <= each.step <= until),
        not_finite=first_not_finite(series, rank, steps),
        maps=tuple(heat_maps(shown, paths)),
        modules=tuple(
            ModuleRow(
                path=path,
                class_name=order.get(path, (0, ""))[1],
                lines={
                    name: _line(each, int(series[of, name].partial.sum()))
                    for (of, name), each in shown.items()
                    if of == path
                },
            )
            for path in paths
        ),
        experts=_experts(recording, shown, paths),
        positions=_positions(recording, shown),
        dropped=recording.dropped(),
        thinned=recording.thinned(),
        partial=sum(int(each.partial.sum()) for each in series.values()),
        values=sum(len(each.step) for each in series.values()),
        samples=len(recording.sampled()),
    )


def first_not_finite(
    series: Mapping[tuple[str, str], Series], rank: Mapping[str, int], steps: Steps
) -> NotFinite | None:
    """The first step with a value that is not finite, and in it the first module in execution order.
    Gradients of steps that were skipped do not count: loss scaling expects them."""
    skipped = set(steps.step[steps.skipped].tolist())
    broken: list[tuple[int, int, str, str]] = []
    for (path, name), each in series.items():
        wrong = each.value > 0 if name == "not_finite" else ~np.isfinite(each.value)
        if name in ("moments", "histogram"):
            continue
        at = [int(step) for step in each.step[wrong] if name != "gradient_norm" or int(step) not in skipped]
        if at:
            broken.append((at[0], rank[path], path, name))
    if not broken:
        return None
    step, _, path, name = min(broken)
    others = sum(each[0] == step for each in broken) - 1
    return NotFinite(step=step, path=path, statistic=name, others=others)


def heat_maps(series: Mapping[tuple[str, str], Series], paths: Sequence[str]) -> list[HeatMap]:
    """One for each statistic and kind of module (a path without its layer's number) that several layers, or
    depths of multi-token prediction, have."""
    kinds: dict[tuple[str, str], list[str]] = {}
    places = {path: where for path in paths if (where := place_of(path)) is not None}
    for path, (place, _) in places.items():
        kind = path.replace(f".{place}", ".*", 1)
        for name in IN_MAPS:
            if (path, name) in series:
                kinds.setdefault((name, kind), []).append(path)
    found = []
    for (name, kind), members in sorted(kinds.items(), key=lambda item: IN_MAPS.index(item[0][0])):
        if len(members) < 2:
            continue
        members.sort(key=lambda path: places[path][0])
        own = [series[path, name] for path in members]
        steps = np.unique(np.concatenate([each.step for each in own]))
        columns = np.array_split(steps, min(MOST_COLUMNS, len(steps)))
        first = np.asarray([column[0] for column in columns], np.int64)
        last = np.asarray([column[-1] for column in columns], np.int64)
        found.append(
            HeatMap(
                title=name if kind.endswith(".*") else f"{name} of {kind.rpartition('.*.')[2]}",
                meaning=STATISTICS[name].meaning,
                rows=tuple(places[path][1] for path in members),
                first=first,
                last=last,
                values=np.stack([_columns(each, first) for each in own]),
            )
        )
    return found


def _columns(each: Series, first: Integers) -> Floats:
    """Median of a series over each column; infinite where a value of it was not finite."""
    found = np.full(len(first), np.nan)
    which = np.searchsorted(first, each.step, side="right") - 1
    for column in np.unique(which):
        values = each.value[which == column]
        found[column] = np.median(values) if np.isfinite(values).all() else math.inf
    return found


def _line(each: Series, partial: int) -> Line:
    pieces = np.array_split(np.arange(len(each.step)), min(MOST_POINTS, len(each.step)))
    value = [
        float(np.median(each.value[piece])) if np.isfinite(each.value[piece]).all() else math.inf
        for piece in pieces
    ]
    return Line(
        step=np.asarray([each.step[piece[-1]] for piece in pieces], np.int64),
        value=np.asarray(value),
        partial=partial,
    )


def _validation(series: Series | None) -> Line | None:
    if series is None or not (finite := np.isfinite(series.value)).any():
        return None
    return Line(step=series.step[finite], value=series.value[finite], partial=0)


def _experts(
    recording: Recording, series: Mapping[tuple[str, str], Series], paths: Sequence[str]
) -> Experts | None:
    loads = [path for path in paths if (path, "expert_load") in series]
    if not loads:
        return None
    step = int(max(series[path, "expert_load"].step[-1] for path in loads))
    vectors = {
        each.path: each.vector
        for each in recording.values(step, statistics=["expert_load"], vectors=True)
        if each.vector is not None and each.whole
    }
    most = max((len(vector) for vector in vectors.values()), default=0)
    share = np.full((len(loads), most), np.nan)
    for row, path in enumerate(loads):
        vector = vectors.get(path)
        if vector is not None and vector.sum() > 0:
            share[row, : len(vector)] = vector / vector.mean()
    return Experts(
        paths=tuple(loads),
        step=step,
        share=share,
        dead=_summed(series, loads, "dead_experts"),
        overloaded=_summed(series, loads, "overloaded_experts"),
    )


def _summed(series: Mapping[tuple[str, str], Series], paths: Sequence[str], name: str) -> Line:
    sums: dict[int, float] = {}
    for path in paths:
        each = series.get((path, name))
        if each is not None:
            for step, value in zip(each.step.tolist(), each.value.tolist(), strict=True):
                if math.isfinite(value):
                    sums[step] = sums.get(step, 0.0) + value
    steps = sorted(sums)
    return Line(
        step=np.asarray(steps, np.int64),
        value=np.asarray([sums[step] for step in steps]),
        partial=0,
    )


def _positions(
    recording: Recording, series: Mapping[tuple[str, str], Series]
) -> tuple[tuple[int, Floats], ...]:
    path = next((path for path, name in series if name == "loss_per_position"), None)
    if path is None:
        return ()
    steps = series[path, "loss_per_position"].step
    found = []
    for step in dict.fromkeys((int(steps[0]), int(steps[-1]))):
        for each in recording.values(step, statistics=["loss_per_position"], vectors=True):
            if each.vector is not None:
                found.append((step, each.vector))
    return tuple(found)
