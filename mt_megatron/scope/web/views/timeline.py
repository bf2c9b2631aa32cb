"""Slices of scan's trace on one clock: what the timeline draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ScanError
from mt_megatron.scan.format.records import KIND, KINDS, OPEN
from mt_megatron.scan.format.segments import RankTrace

from .context import Answer, Context
from .timeline_reader import TimelineReader

if TYPE_CHECKING:
    from mt_megatron.scan.analysis.trace import Trace

LANES = ("step", "work", "modules", "communication", "device")
"""Rows of one rank. Within a row the later and shorter slice is drawn over the earlier one."""

_LANE = np.zeros(len(KINDS), np.uint8)
for _kind, _lane in {
    "step": 0,
    "microbatch": 0,
    "forward": 1,
    "backward": 1,
    "optimizer": 1,
    "data": 1,
    "checkpoint": 1,
    "other": 1,
    "pause": 1,
    "layer": 2,
    "module": 2,
    "collective": 3,
    "p2p": 3,
    "kernel": 4,
}.items():
    _LANE[KIND[_kind]] = _lane

DEFAULT_STEPS = 3


def timeline_steps(context: Context, query: dict[str, Any]) -> Answer:
    """Steps of the trace: number, begin and length in ms."""
    trace = _trace(context)
    if trace is None:
        return Answer(
            facts={"trace": False}, arrays={"i": np.zeros(0), "begin": np.zeros(0), "ms": np.zeros(0)}
        )
    numbers, begins, ends = context.timeline.steps(trace)
    start = int(begins[0]) if len(begins) else 0
    return Answer(
        facts={"trace": True, "ranks": list(trace.ranks), "missing": list(trace.missing)},
        arrays={"i": numbers, "begin": (begins - start) / 1e6, "ms": (ends - begins) / 1e6},
    )


def timeline(context: Context, query: dict[str, Any]) -> Answer:
    """All slices of steps ``first`` to ``last`` (the newest ``DEFAULT_STEPS`` without them), sorted by rank,
    lane, begin and falling length. Times are us after ``origin``. Beyond ``most`` slices the shortest are
    left out, and counted."""
    trace = _trace(context)
    empty = Answer(facts={"trace": False, "names": [], "ranks": []}, arrays={})
    if trace is None:
        return empty
    reader = context.timeline
    last = query["last"]
    if last is None:
        known = reader.steps(trace)[0]
        last = int(known.max()) if len(known) else 0
    first = query["first"] if query["first"] is not None else max(0, last - DEFAULT_STEPS + 1)
    names: dict[str, int] = {}
    parts = [_rank(reader, trace, rank, first, last, names) for rank in trace.ranks]
    parts = [each for each in parts if len(each["begin"])]
    if not parts:
        return Answer(
            facts={"trace": True, "names": [], "ranks": [], "first": first, "last": last}, arrays={}
        )
    columns = {key: np.concatenate([each[key] for each in parts]) for key in parts[0]}
    left_out = max(0, len(columns["begin"]) - query["most"])
    if left_out:
        keep = np.sort(np.argsort(columns["ns"], kind="stable")[left_out:])
        columns = {key: each[keep] for key, each in columns.items()}
    origin = int(columns["begin"].min())
    order = np.lexsort((-columns["ns"], columns["begin"], columns["lane"], columns["rank"]))
    columns = {key: each[order] for key, each in columns.items()}
    return Answer(
        facts={
            "trace": True,
            "first": first,
            "last": last,
            "origin_ns": origin,
            "names": list(names),
            "kinds": list(KINDS),
            "lanes": list(LANES),
            "ranks": [
                {"rank": rank, **{axis: getattr(trace.places[rank], axis) for axis in ("pp", "tp", "dp")}}
                for rank in trace.ranks
                if rank in trace.places
            ],
            "left_out": left_out,
            "clock_error_us": _finite(trace.clock_error(trace.ranks) / 1e3),
        },
        arrays={
            "begin": (columns["begin"] - origin) / 1e3,
            "us": np.asarray(columns["ns"] / 1e3, np.float32),
            "rank": columns["rank"].astype(np.uint16),
            "lane": columns["lane"],
            "kind": columns["kind"],
            "name": columns["name"].astype(np.uint16),
            "step": columns["step"].astype(np.int32),
            "bytes": np.asarray(columns["bytes"], np.float32),
            "peer": columns["peer"].astype(np.int32),
            "microbatch": columns["microbatch"].astype(np.int16),
        },
    )


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _trace(context: Context) -> Trace | None:
    if context.folder is None:
        return None
    try:
        return context.timeline.trace(context.folder)
    except (ScanError, OSError):
        return None


def _rank(
    reader: TimelineReader, trace: Trace, rank: int, first: int, last: int, names: dict[str, int]
) -> dict[str, NDArray[Any]]:
    pieces = [_piece(part, trace, rank, first, last, names) for part in reader.parts(trace, rank, first)]
    if not pieces:
        return {"begin": np.empty(0, np.int64)}
    return {key: np.concatenate([each[key] for each in pieces]) for key in pieces[0]}


def _piece(
    part: RankTrace, trace: Trace, rank: int, first: int, last: int, names: dict[str, int]
) -> dict[str, NDArray[Any]]:
    spans = part.spans
    spans = spans[(spans["iteration"] >= first) & (spans["iteration"] <= last) & (spans["end"] != OPEN)]
    numbers = np.zeros(len(part.strings) + 1, np.int64)
    for index, text in enumerate(part.strings):
        numbers[index] = names.setdefault(text, len(names))
    timed = spans["device_begin"] != 0
    host = _columns(spans, spans["begin"], spans["end"], _LANE[spans["kind"]], trace, rank, numbers)
    device = spans[timed]
    lanes = np.full(len(device), LANES.index("device"), np.uint8)
    on_device = _columns(device, device["device_begin"], device["device_end"], lanes, trace, rank, numbers)
    return {key: np.concatenate([host[key], on_device[key]]) for key in host}


def _columns(
    spans: NDArray[np.void],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    lane: NDArray[np.uint8],
    trace: Trace,
    rank: int,
    numbers: NDArray[np.int64],
) -> dict[str, NDArray[Any]]:
    start = np.asarray(trace.clocks.to_reference(rank, begin), np.int64)
    stop = np.asarray(trace.clocks.to_reference(rank, end), np.int64)
    return {
        "begin": start,
        "ns": np.maximum(stop - start, 0),
        "rank": np.full(len(spans), rank, np.int64),
        "lane": lane,
        "kind": spans["kind"],
        "name": numbers[spans["name"]],
        "step": spans["iteration"],
        "bytes": spans["bytes"],
        "peer": spans["peer"],
        "microbatch": spans["microbatch"],
    }
