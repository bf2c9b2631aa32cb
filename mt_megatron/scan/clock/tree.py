"""From pings between pairs of clocks to one way from each clock to the reference, and what checks it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .edges import EdgeFit, exchanges, fit_edge
from .offset_lines import OffsetLine, same_clock

_SPARE_NS = 200_000.0

Edge = tuple[int, int]
"""Two domains, the lower first."""


def fit_edges(pings: Mapping[int, np.ndarray], domains: Mapping[int, int]) -> dict[Edge, EdgeFit]:
    """The line from the lower to the higher domain for every two that exchanged pings."""
    asked: dict[Edge, list[np.ndarray]] = {}
    answered: dict[Edge, list[np.ndarray]] = {}
    for rank, rows in pings.items():
        for peer in np.unique(rows["peer"]).tolist():
            if peer not in domains or domains[peer] == domains[rank]:
                continue
            own, other = domains[rank], domains[peer]
            edge, ways = ((own, other), asked) if own < other else ((other, own), answered)
            ways.setdefault(edge, []).append(rows[rows["peer"] == peer])
    found = {}
    for edge in sorted({*asked, *answered}):
        fit = fit_edge(exchanges(asked.get(edge, []), answered.get(edge, [])))
        if fit is not None:
            found[edge] = fit
    return found


def ways_home(
    fits: Mapping[Edge, EdgeFit], home: int
) -> tuple[dict[int, OffsetLine], dict[int, tuple[Edge, ...]]]:
    """Lines to ``home`` along the ways of least uncertainty (Dijkstra), and the ways."""
    lines = {home: same_clock()}
    ways: dict[int, tuple[Edge, ...]] = {home: ()}
    costs = {home: 0.0}
    while True:
        # Few domains: the next one is looked for among all edges.
        candidates = []
        for (low, high), fit in fits.items():
            for near, far in ((low, high), (high, low)):
                if near in lines and far not in lines:
                    candidates.append((costs[near] + fit.uncertainty, far, near, (low, high)))
        if not candidates:
            return lines, ways
        cost, far, near, edge = min(candidates)
        towards = fits[edge].line if edge == (far, near) else fits[edge].line.inverse()
        lines[far] = towards.then(lines[near])
        ways[far] = (*ways[near], edge)
        costs[far] = cost


def triangles_beside(
    fits: Mapping[Edge, EdgeFit], lines: Mapping[int, OffsetLine], used: set[Edge]
) -> dict[int, float]:
    """Per domain, how far pings beside the tree are from what the tree says; ns."""
    found: dict[int, float] = {}
    for (low, high), fit in fits.items():
        if (low, high) in used or low not in lines or high not in lines:
            continue
        at = fit.line.knots
        difference = np.abs(lines[high](fit.line(at)) - lines[low](at))
        disagreement = float(np.median(difference))
        for domain in (low, high):
            found[domain] = max(found.get(domain, 0.0), disagreement)
    return found


def most_wrong(fits: Mapping[Edge, EdgeFit], way: tuple[Edge, ...] | None) -> float:
    """ns by which a line can be wrong; infinite where nothing was measured."""
    if way is None:
        return float("inf")
    between = [fits[edge].left_out_p99 for edge in way]
    return (
        4 * sum(fits[edge].uncertainty for edge in way)
        + 4 * sum(each for each in between if each == each)
        + _SPARE_NS * len(way)
    )
