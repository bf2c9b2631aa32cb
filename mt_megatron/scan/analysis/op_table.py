"""Brings the sides of every communication together, rank by rank, and keeps only what they say in common.

Transfers that share a call (``own_ends``): interleaved schedules send and receive to and from several ranks
in one call and wait for all of it. Its end tells of one transfer only: the one that began last, unless
another is known to take so long that it explains the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .matched_ops import (
    Edge,
    Group,
    Labels,
    RankExchanges,
    Rows,
    Samples,
    SideLog,
    Transfers,
    edge_rows,
    edge_transfers,
    group_rows,
)
from .robust import Floats
from .trace import Place
from .units import Unit, edge_name


class ExchangeStore:
    """Times of all groups and edges of which every side was added."""

    def __init__(self, places: Mapping[int, Place], clock_error: Callable[[tuple[int, ...]], float]) -> None:
        """``clock_error``: ns by which the clocks of some ranks may be wrong against each other."""
        self._places = places
        self._clock_error = clock_error
        self.labels = Labels()
        self._groups: dict[Group, dict[int, SideLog]] = {}
        self._sends: dict[Edge, SideLog] = {}
        self._receives: dict[Edge, SideLog] = {}
        self._together: dict[Edge, Transfers] = {}
        self._rows: dict[tuple[str, tuple[int, ...], bool], list[Rows]] = {}
        self._samples: dict[Group, list[Samples]] = {}

    def add(self, part: RankExchanges) -> None:
        """One rank's side; a group or edge is worked out when its last side is there."""
        for group, log in part.groups.items():
            sides = self._groups.setdefault(group, {})
            sides[part.rank] = log
            if len(sides) == len(group[1]):
                self._group(group, [self._groups[group][rank] for rank in group[1]])
                del self._groups[group]
        self._sends.update(part.sends)
        self._receives.update(part.receives)
        for edge in [*part.sends, *part.receives]:
            if edge in self._sends and edge in self._receives:
                send, receive = self._sends.pop(edge), self._receives.pop(edge)
                transfers = edge_transfers(send, receive, self.labels)
                if send.shared.any() or receive.shared.any():
                    self._together[edge] = transfers
                else:
                    self._edge(edge, transfers, None)

    def settle(self) -> None:
        """All sides that will come are there: work out what shares its calls with others, drop the rest."""
        for edge, chosen in own_ends(self._together).items():
            self._edge(edge, self._together[edge], chosen)
        self._together.clear()
        self._groups.clear()
        self._sends.clear()
        self._receives.clear()

    def forget(self, before_step: int) -> None:
        """Drop earlier steps."""
        for key, parts in self._rows.items():
            self._rows[key] = [part for part in parts if part.iteration.max(initial=-1) >= before_step]
        for group, samples in self._samples.items():
            self._samples[group] = [each for each in samples if each.iteration.max(initial=-1) >= before_step]

    def units(self) -> list[Unit]:
        """Everything that was worked out."""
        found = []
        for (name, ranks, is_edge), parts in self._rows.items():
            if not parts:
                continue
            rows = _joined_rows(parts)
            kept = None if is_edge else _joined_samples(self._samples.get((name, ranks), []))
            samples = [] if kept is None else _by_label(kept, rows)
            nodes = {self._places[rank].node for rank in ranks if rank in self._places}
            found.append(
                Unit(
                    name=name,
                    ranks=ranks,
                    is_edge=is_edge,
                    crosses=len(nodes) > 1,
                    rows=rows,
                    samples=samples[0] if samples else None,
                    others=tuple(samples[1:2]),
                    clock_error=self._clock_error(ranks),
                )
            )
        return found

    def _group(self, group: Group, logs: list[SideLog]) -> None:
        error = self._clock_error(group[1])
        rows, samples = group_rows(logs, self.labels, error, samples=len(logs) > 2)
        if len(rows.time):
            self._rows.setdefault((*group, False), []).append(rows)
        if samples is not None and len(samples.iteration):
            self._samples.setdefault(group, []).append(samples)

    def _edge(self, edge: Edge, transfers: Transfers, chosen: NDArray[np.bool_] | None) -> None:
        rows = edge_rows(transfers, self._clock_error(edge), chosen)
        if len(rows.time):
            name = edge_name(self._place, *edge)
            self._rows.setdefault((name, edge, True), []).append(rows)

    def _place(self, rank: int) -> Place:
        return self._places.get(rank) or Place(rank=rank)


def _joined_rows(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return Rows(
        iteration=np.concatenate([part.iteration for part in parts]),
        label=np.concatenate([part.label for part in parts]),
        count=np.concatenate([part.count for part in parts]),
        time=np.concatenate([part.time for part in parts]),
    )


def _by_label(samples: Samples, rows: Rows) -> list[Samples]:
    """``samples`` of each label by itself, that first which takes most time in all."""
    total = np.bincount(rows.label, weights=rows.time * rows.count)
    labels = sorted(np.unique(samples.label).tolist(), key=lambda each: -float(total[each]))
    return [samples.take(samples.label == each) for each in labels]


def _joined_samples(parts: list[Samples]) -> Samples | None:
    if not parts:
        return None
    return replace(
        parts[0],
        iteration=np.concatenate([part.iteration for part in parts]),
        label=np.concatenate([part.label for part in parts]),
        arrival=np.concatenate([part.arrival for part in parts]),
        exit=np.concatenate([part.exit for part in parts]),
    )


_SLACK_NS = 2_000
"""Begins closer than this are at the same time."""

_USUAL = 0.2
"""The quantile of an edge's times that no other transfer is likely to have lengthened."""

_STRIDE = 1 << 20
_NEAR = 0.15
"""Of the time: an end explained as well as this is explained."""


def own_ends(edges: Mapping[Edge, Transfers]) -> dict[Edge, NDArray[np.bool_]]:
    """Per edge, which of its transfers end with a receiver's call that no other transfer explains."""
    calls = _calls(edges)
    first = {edge: np.ones(len(found.ready), dtype=bool) for edge, found in edges.items()}
    for edge, rows, ready, latest, _ in _receivers(edges, calls, None):
        first[edge][rows] = ready >= latest - _SLACK_NS
    usual = {edge: _usual(found, first[edge]) for edge, found in edges.items()}
    chosen = {edge: mask.copy() for edge, mask in first.items()}
    for edge, rows, _, _, explained in _receivers(edges, calls, usual):
        found = edges[edge]
        time = (found.receive_end[rows] - found.ready[rows]).astype(np.float64)
        chosen[edge][rows] &= explained < found.receive_end[rows] - _NEAR * time
    return chosen


class _Calls:
    """All transfers of one rank, sorted by the begin of the call they were part of."""

    def __init__(self) -> None:
        self.begin: list[NDArray[np.int64]] = []
        self.edge: list[Edge] = []
        self.rows: list[NDArray[np.int64]] = []


def _calls(edges: Mapping[Edge, Transfers]) -> dict[int, _Calls]:
    found: dict[int, _Calls] = {}
    for edge, transfers in edges.items():
        for rank, begin in ((edge[0], transfers.send_begin), (edge[1], transfers.receive_begin)):
            calls = found.setdefault(rank, _Calls())
            calls.begin.append(begin)
            calls.edge.append(edge)
            calls.rows.append(np.arange(len(begin)))
    return found


def _receivers(
    edges: Mapping[Edge, Transfers], calls: Mapping[int, _Calls], usual: Mapping[Edge, Floats] | None
) -> list[tuple[Edge, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], Floats]]:
    """Per edge, of its receives: positions, when ready, when the call's last other transfer was ready, and
    when the others would usually have ended (-inf without ``usual``)."""
    found = []
    for rank, of_rank in calls.items():
        begin = np.concatenate(of_rank.begin)
        ready = np.concatenate([edges[edge].ready for edge in of_rank.edge])
        ends = np.full(len(begin), -np.inf)
        if usual is not None:
            ends = ready + np.concatenate([usual[edge] for edge in of_rank.edge])
        _, call = np.unique(begin, return_inverse=True)
        latest, explained = _largest_of_others(call, ready.astype(np.float64)), _largest_of_others(call, ends)
        start = 0
        for edge, rows in zip(of_rank.edge, of_rank.rows, strict=True):
            part = slice(start, start + len(rows))
            start += len(rows)
            if edge[1] == rank:
                others = np.maximum(latest[part], np.iinfo(np.int64).min / 2).astype(np.int64)
                found.append((edge, rows, ready[part], others, explained[part]))
    return found


def _largest_of_others(call: NDArray[np.int64], values: Floats) -> Floats:
    """For each entry the largest value among the other entries of its call; -inf if it is alone."""
    if not len(values):
        return np.empty(0)
    order = np.lexsort((values, call))
    ordered = call[order]
    last = np.concatenate((ordered[1:] != ordered[:-1], [True]))
    tops = np.flatnonzero(last)
    group = np.searchsorted(tops, np.arange(len(order)))
    top = values[order][tops][group]
    size = np.diff(np.concatenate(([-1], tops)))
    second = np.where(size > 1, values[order][np.maximum(tops - 1, 0)], -np.inf)[group]
    largest = np.empty(len(values))
    largest[order] = np.where(last, second, top)
    return largest


def _usual(found: Transfers, chosen: NDArray[np.bool_]) -> Floats:
    """What each of the edge's transfers takes if nothing else lengthens it, by step and label."""
    time = (found.receive_end - found.ready).astype(np.float64)
    _, group = np.unique(found.iteration * _STRIDE + found.label, return_inverse=True)
    # Of each step the lower fifth of what is believed; where nothing is, of everything.
    order = np.lexsort((time, ~chosen, group))
    starts = np.flatnonzero(np.concatenate(([True], np.diff(group[order]) > 0)))
    believed = np.bincount(group, weights=chosen).astype(np.int64)
    size = np.where(believed > 0, believed, np.bincount(group))
    low = time[order][starts + (_USUAL * (size - 1)).astype(np.int64)]
    usual: Floats = low[group]
    return usual
