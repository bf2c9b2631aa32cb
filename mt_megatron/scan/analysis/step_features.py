"""What one rank did in each step: its own work between communications, and what kept it from working.

All of it is measured on the rank's own clock: nothing needs to be aligned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.format.records import COMMANDED, KIND, OPEN
from mt_megatron.scan.format.segments import RankTrace

from .intervals import Cover, Times
from .robust import Floats, grouped_median, median_of_rows

LEAST_BEAT_NS = 5e6
"""A recorder's thread that wakes up later than this did not run: the host had other things to do."""

CUMULATIVE = (
    "run_queue_wait_ns",
    "process_cpu_ns",
    "throttled_ns",
    "gc_pause_ns",
    "major_faults",
    "involuntary_switches",
)
_FEW = 0.3
_OF_BATCH = ("step", "data", "microbatch", "forward", "backward")
LEVELS = ("steal_fraction", "clock_mhz", "temperature_c", "throttled", "data_queue_depth")
COLUMNS = (
    "step",
    "compute",
    "phases",
    "other",
    "forward",
    "backward",
    "optimizer",
    "layer",
    "communication",
    "data",
    "checkpoint",
    "checkpoint_bytes",
    "on_host",
    "pause",
    "longest_pause",
    "work",
    "expert_work",
    *CUMULATIVE,
    *LEVELS,
)
"""Columns of ``RankSteps``; see there."""


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """One rank's steps, ascending; columns [steps], times in ns, NaN where nobody said."""

    rank: int
    iteration: NDArray[np.int64]
    begin: Times
    """By the rank's own clock."""

    end: Times
    columns: Mapping[str, Floats]
    """``compute``: own work, communications taken out: ``phases`` where they are recorded, else the whole
    step's (``own_work``). ``phases``: own work in forward, backward and optimizer. ``other``: the rest of
    the step. ``layer``: the median layer's own forward. ``pause``: time in which the process demonstrably
    stood still, from step to step; ``longest_pause`` the longest single one. ``work``: tokens of its
    micro-batches where they were said; ``expert_work``: what its experts got. ``checkpoint_bytes``: what it
    wrote. ``on_host``: 1 where the rank says that it computes on the host's processors, else 0. Counters as
    they grew during the step, or their mean."""


def rank_steps(rank: int, trace: RankTrace) -> RankSteps:
    """The steps that ``trace`` holds whole. Spans still open count as not there."""
    spans = trace.spans
    # Modules and kernels are many and say nothing here, but for the experts' work.
    many = (spans["kind"] == KIND["kernel"]) | ((spans["kind"] == KIND["module"]) & (spans["work"] <= 0))
    ended = (spans["end"] != OPEN) & ~many
    if not ended.all():
        spans = spans[ended]
    kind = spans["kind"]
    steps = spans[kind == KIND["step"]]
    steps = steps[np.argsort(steps["begin"], kind="stable")]
    if len(steps):
        # A step that was begun twice (an iteration run again after a rollback) counts with its last run.
        _, last = np.unique(steps["iteration"][::-1], return_index=True)
        steps = steps[len(steps) - 1 - last]
        steps = steps[np.argsort(steps["begin"], kind="stable")]
    begin, end = steps["begin"].astype(np.int64), steps["end"].astype(np.int64)
    commanded = _commanded(trace, spans)
    period_end = np.concatenate((np.maximum(begin[1:], end[:-1]), end[-1:]))
    # A period is over where the run was told to stand still.
    for pause in spans[commanded]["begin"].astype(np.int64):
        holds = (begin <= pause) & (pause < period_end)
        period_end[holds] = np.maximum(pause, end[holds])
    columns = {name: np.full(len(steps), np.nan) for name in COLUMNS}
    found = RankSteps(
        rank=rank,
        iteration=steps["iteration"].astype(np.int64),
        begin=begin,
        end=end,
        columns=columns,
    )
    if not len(steps):
        return found
    starts, stops = _times(spans)
    on_main = spans["thread"] == steps["thread"][-1]
    communicates = (kind == KIND["collective"]) | (kind == KIND["p2p"])
    data = on_main & (kind == KIND["data"])
    checkpoint = on_main & (kind == KIND["checkpoint"])
    network = Cover(starts[communicates], stops[communicates])
    away = communicates | data | checkpoint
    not_working = Cover(starts[away], stops[away])
    columns["step"] = (end - begin).astype(np.float64)
    columns["communication"] = network.within(begin, end)
    own = columns["step"] - not_working.within(begin, end)
    places = np.searchsorted(begin, starts, side="right") - 1
    inside = (places >= 0) & (places < len(begin))
    for name, chosen in (("data", data), ("checkpoint", checkpoint)):
        rows = chosen & inside
        length = (stops[rows] - starts[rows]) - network.within(starts[rows], stops[rows])
        columns[name] = np.bincount(places[rows], weights=length, minlength=len(begin))
    rows = checkpoint & inside & (spans["bytes"] > 0)
    columns["checkpoint_bytes"] = np.bincount(
        places[rows], weights=spans["bytes"][rows], minlength=len(begin)
    ).astype(np.float64)
    columns["on_host"] = np.full(len(begin), float(trace.meta.get("device_type") == "cpu"))
    worked = np.zeros(len(begin))
    for name in ("forward", "backward", "optimizer"):
        rows = inside & on_main & (kind == KIND[name])
        if rows.any():
            length = (stops[rows] - starts[rows]) - not_working.within(starts[rows], stops[rows])
            columns[name] = np.bincount(places[rows], weights=length, minlength=len(begin))
            worked += columns[name]
    columns["phases"], columns["other"] = worked, own - worked
    columns["compute"] = own_work(worked, own)
    rows = inside & (kind == KIND["layer"])
    if rows.any():
        length = (stops[rows] - starts[rows]) - not_working.within(starts[rows], stops[rows])
        which, middle, _ = grouped_median(places[rows].astype(np.int64), length)
        columns["layer"][which] = middle
    of_batch = np.isin(kind, [KIND[name] for name in _OF_BATCH])
    columns["work"] = _work(spans, places, inside & of_batch, len(begin))
    columns["expert_work"] = _work(spans, places, inside & ~of_batch, len(begin))
    _pauses(columns, trace, spans[~commanded], begin, period_end)
    _counters(columns, trace, begin, period_end)
    return found


def own_work(phases: Floats, own: Floats) -> Floats:
    """The measure of own work, [steps] or [ranks, steps]: ``phases`` if every rank has them recorded, else
    ``own``, all of its time outside communication.

    One measure for all ranks that are compared: with two, the one without phases would look slow.
    """
    # Without spans of the phases, or with few of them, the step is all there is.
    unknown = median_of_rows(np.atleast_2d(phases).T) <= _FEW * median_of_rows(np.atleast_2d(own).T)
    return own if unknown.any() else phases


def _commanded(trace: RankTrace, spans: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which spans are pauses that somebody asked for."""
    named = trace.strings.index(COMMANDED) if COMMANDED in trace.strings else -1
    return np.asarray((spans["kind"] == KIND["pause"]) & (spans["name"] == named))


def _times(spans: NDArray[np.void]) -> tuple[Times, Times]:
    """Begin and end of each span: the device's times where the device was timed."""
    timed = spans["device_end"] > 0
    begin = np.where(timed, spans["device_begin"], spans["begin"]).astype(np.int64)
    end = np.where(timed, spans["device_end"], spans["end"]).astype(np.int64)
    return begin, end


def _work(
    spans: NDArray[np.void], places: NDArray[np.int64], inside: NDArray[np.bool_], steps: int
) -> Floats:
    """Units per step, of the kind of span that says most: the same units may be said at several."""
    said = inside & (spans["work"] > 0)
    best = np.full(steps, np.nan)
    for kind in np.unique(spans["kind"][said]):
        rows = said & (spans["kind"] == kind)
        total = np.bincount(places[rows], weights=spans["work"][rows], minlength=steps)
        if not np.nansum(best) >= total.sum():
            best = total
    return best


def _pauses(
    columns: dict[str, Floats], trace: RankTrace, spans: NDArray[np.void], begin: Times, end: Times
) -> None:
    """Stretches in which the process stood still: late beats of its recorder, and pauses it knows of."""
    starts, stops = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    rows = spans[spans["kind"] == KIND["pause"]]
    starts.append(rows["begin"].astype(np.int64))
    stops.append(rows["end"].astype(np.int64))
    late = _counter(trace, "beat_delay_ns")
    late = late[late["value"] >= LEAST_BEAT_NS]
    starts.append(late["time"] - late["value"].astype(np.int64))
    stops.append(late["time"].astype(np.int64))
    first, last = np.concatenate(starts), np.concatenate(stops)
    columns["pause"] = Cover(first, last).within(begin, end)
    longest = np.zeros(len(begin))
    place = np.searchsorted(begin, first, side="right") - 1
    fits = place >= 0
    np.maximum.at(longest, place[fits], (last - first)[fits].astype(np.float64))
    columns["longest_pause"] = longest


def _counters(columns: dict[str, Floats], trace: RankTrace, begin: Times, end: Times) -> None:
    for name in CUMULATIVE:
        rows = _counter(trace, name)
        if len(rows) >= 2:
            at = rows["time"].astype(np.float64)
            columns[name] = np.interp(end, at, rows["value"]) - np.interp(begin, at, rows["value"])
    middle = (begin + end) / 2.0
    for name in LEVELS:
        rows = _counter(trace, name)
        if len(rows):
            columns[name] = np.interp(middle, rows["time"].astype(np.float64), rows["value"])


def _counter(trace: RankTrace, name: str) -> NDArray[np.void]:
    if name not in trace.strings:
        return trace.counters[:0]
    rows = trace.counters[trace.counters["name"] == trace.strings.index(name)]
    ordered: NDArray[np.void] = rows[np.argsort(rows["time"], kind="stable")]
    return ordered
