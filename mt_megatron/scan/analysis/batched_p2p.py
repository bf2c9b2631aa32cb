"""Transfers that share a call with others: the call ends with the slowest, whose end is it?

Interleaved schedules send and receive to and from several ranks in one call and wait for all of it. Its
end tells of one transfer only: the one that began last, unless another is known to take so long that it
explains the end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .matched_ops import Edge, Transfers
from .robust import Floats

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
