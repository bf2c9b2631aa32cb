"""How a rank's spans lie on the tracks of a trace viewer: threads, device, kernels, pauses.

A viewer draws what overlaps on one track only if one span lies within the other; what does not nest goes
on to a lane of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.format.records import ASYNC, COUNTERS, KIND, KINDS, WAIT
from mt_megatron.scan.format.segments import Group

from .rank_stream import Piece

LANES = 8
"""Of one track at most; what still does not fit is drawn where it overlaps least."""

_PAUSES, _DEVICE, _DEVICE_COMMUNICATION, _KERNELS = 3_000, 3_100, 3_200, 3_300
_NAMES = {
    _DEVICE: "device",
    _DEVICE_COMMUNICATION: "device: communication",
    _KERNELS: "device: kernels",
    _PAUSES: "pauses",
}
_COMMUNICATION = (KIND["collective"], KIND["p2p"])

_RATE = {
    "run_queue_wait_ns": ("run queue, share of time", 1.0),
    "process_cpu_ns": ("processors in use", 1.0),
    "throttled_ns": ("quota, share of time", 1.0),
    "gc_pause_ns": ("gc, share of time", 1.0),
    "major_faults": ("major faults per s", 1e9),
    "minor_faults": ("minor faults per s", 1e9),
    "voluntary_switches": ("switches per s, voluntary", 1e9),
    "involuntary_switches": ("switches per s, forced", 1e9),
}
"""Counters that count up are shown as what they grow per ns, times the factor."""

_SCALED = {"beat_delay_ns": ("recorder late, ms", 1e-6), "memory_bytes": ("device memory, GB", 1e-9)}


@dataclass(frozen=True)
class Slice:
    """A span on its track, with times in ns."""

    track: int
    begin: int
    end: int
    index: int
    """Of the span in the piece."""


@dataclass
class Lanes:
    """Open ends per lane of every track of one rank, kept from piece to piece."""

    open: dict[int, list[list[int]]] = field(default_factory=dict)

    def place(self, track: int, begin: int, end: int) -> int:
        """The lane for a span; spans of a track come in the order of (begin, -end)."""
        lanes = self.open.setdefault(track, [])
        for number, stack in enumerate(lanes):
            while stack and stack[-1] <= begin:
                stack.pop()
            if not stack or stack[-1] >= end:
                stack.append(end)
                return number
        if len(lanes) < LANES:
            lanes.append([end])
            return len(lanes) - 1
        return LANES - 1


def slices(piece: Piece, lanes: Lanes) -> Iterator[Slice]:
    """Every span of ``piece`` where a viewer shall draw it, per track in the order of begins; a span that
    the device timed is there twice."""
    spans = piece.spans
    kinds = spans["kind"]
    timed = spans["device_begin"] != 0
    kernel, pause = kinds == KIND["kernel"], kinds == KIND["pause"]
    base = np.where(pause, _PAUSES, spans["thread"].astype(np.int64) * LANES)
    base = np.where(kernel, _KERNELS, base)
    # A kernel has happened on the device, or, without one, where the host's times say.
    on_host = ~(kernel & timed)
    yield from _placed(base[on_host], spans["begin"][on_host], spans["end"][on_host], on_host, lanes)
    base = np.where(np.isin(kinds, _COMMUNICATION), _DEVICE_COMMUNICATION, _DEVICE)
    base = np.where(kernel, _KERNELS, base)
    yield from _placed(base[timed], spans["device_begin"][timed], spans["device_end"][timed], timed, lanes)


def step_thread(piece: Piece) -> int:
    """The thread that runs the steps: the training thread."""
    threads = piece.spans["thread"][piece.spans["kind"] == KIND["step"]]
    return int(threads[0]) if len(threads) else 0


def track_name(track: int, training: int) -> str:
    """What a viewer writes beside it; ``training``: the number of the training thread."""
    if track >= _PAUSES:
        base = max(each for each in _NAMES if each <= track)
        return _NAMES[base] + (f" ({track - base + 1})" if track > base else "")
    thread, lane = divmod(track, LANES)
    name = "training thread" if thread == training else f"thread {thread}"
    return name + (f" ({lane + 1})" if lane else "")


def labels(piece: Piece) -> list[str]:
    """What is written on each span: the group and operation, the transfer's other side, the module."""
    spans = piece.spans
    keys = np.stack(
        [
            spans["kind"],
            spans["name"],
            spans["group"],
            np.where(spans["kind"] == KIND["p2p"], spans["peer"], -1),
        ],
        axis=1,
    ).astype(np.int64)
    flags = (spans["flags"] & (ASYNC | WAIT)).astype(np.int64)
    unique, inverse = np.unique(np.column_stack((keys, flags)), axis=0, return_inverse=True)
    texts = [_label(row, piece.strings, piece.groups) for row in unique.tolist()]
    return [texts[index] for index in inverse.reshape(-1).tolist()]


@dataclass
class Plotted:
    """What of a rank's counters was plotted so far, kept from piece to piece."""

    last: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)
    """Counter and device -> time and value of the last record."""

    begun: set[str] = field(default_factory=set)


def counter_points(
    counters: NDArray[np.void], strings: Sequence[str], plotted: Plotted
) -> Iterator[tuple[int, str, float]]:
    """``(time, name, value)`` to plot. A counter begins with its first value that is not 0: a row of
    nothing for each thing that never happened would hide the rest."""
    columns = (counters[name].tolist() for name in ("time", "value", "name", "device"))
    for time, value, number, device in zip(*columns, strict=True):
        if not math.isfinite(value):
            continue  # No JSON has a word for it; one would make the whole trace unreadable.
        text = strings[number] if number < len(strings) else f"counter {number}"
        name = text.replace("_", " ") if text in COUNTERS else text
        if text in _RATE:
            name, factor = _RATE[text]
            earlier = plotted.last.get((text, device))
            plotted.last[text, device] = (time, value)
            if earlier is None or time <= earlier[0]:
                continue
            value = max(0.0, value - earlier[1]) / (time - earlier[0]) * factor
        elif text in _SCALED:
            name, factor = _SCALED[text]
            value *= factor
        name += f" [{device}]" if device else ""
        if value or name in plotted.begun or text == "data_queue_depth":
            plotted.begun.add(name)
            yield time, name, value


def _placed(
    base: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    lanes: Lanes,
) -> Iterator[Slice]:
    end = np.maximum(begin, end)
    order = np.lexsort((-end, begin, base))
    rows = zip(
        base[order].tolist(),
        begin[order].tolist(),
        end[order].tolist(),
        np.flatnonzero(chosen)[order].tolist(),
        strict=True,
    )
    for track, first, last, index in rows:
        yield Slice(track + lanes.place(track, first, last), first, last, index)


def _label(row: Sequence[int], strings: Sequence[str], groups: Mapping[int, Group]) -> str:
    kind, name, group, peer, flags = row
    text = strings[name] if 0 < name < len(strings) else ""
    suffix = " (start)" if flags & ASYNC else " (wait)" if flags & WAIT else ""
    if kind == KIND["collective"]:
        of = groups[group].name + " " if group in groups else ""
        return f"{of}{text or 'collective'}{suffix}"
    if kind == KIND["p2p"]:
        way = "to" if text == "send" else "from"
        return f"{text or 'p2p'} {way} {peer}{suffix}" if peer >= 0 else (text or "p2p") + suffix
    return (text or KINDS[kind]) + suffix
