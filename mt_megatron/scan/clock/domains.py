"""Which ranks share a clock: those of one boot of one machine, unless their pings contradict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .edges import exchanges, fit_edge

_CONTRADICTING = 0.05


def clock_domains(
    metas: Mapping[int, Mapping[str, Any]], pings: Mapping[int, np.ndarray]
) -> tuple[dict[int, int], list[str]]:
    """Rank -> the lowest rank with the same clock, and what is odd about it.

    ``metas`` are the first notes of the ranks' traces (``boot_id``, ``clock``), ``pings`` their ``PING``
    records. A rank that does not say its ``boot_id`` has a clock of its own. Two ranks share none if more
    than one in twenty of the exchanges between them excludes it (an answer from before its question).
    """
    first: dict[tuple[object, object], int] = {}
    found: dict[int, int] = {}
    notes: list[str] = []
    for rank in sorted(metas):
        boot = metas[rank].get("boot_id")
        key = (boot or f"rank {rank}", metas[rank].get("clock"))
        domain = first.setdefault(key, rank)
        if domain != rank and (
            _contradict(rank, domain, found, pings) or _differ(pings.get(rank), pings.get(domain))
        ):
            notes.append(
                f"ranks {domain} and {rank} say they run on one machine and their pings exclude that they "
                f"share a clock: rank {rank} gets its own (is it in another time namespace?)"
            )
            domain = rank
        found[rank] = domain
    return found, notes


def _contradict(rank: int, domain: int, domains: Mapping[int, int], pings: Mapping[int, np.ndarray]) -> bool:
    peers = {other for other, each in domains.items() if each == domain}
    impossible = total = 0
    own = pings.get(rank)
    if own is not None:
        impossible, total = _excluded(own[np.isin(own["peer"], list(peers))])
    for peer in peers & pings.keys():
        more, of = _excluded(pings[peer][pings[peer]["peer"] == rank])
        impossible, total = impossible + more, total + of
    return impossible > _CONTRADICTING * total


def _differ(own: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether pings to the same third rank exclude that two ranks have one clock."""
    if own is None or other is None:
        return False
    outside = total = 0
    for peer in np.intersect1d(own["peer"], other["peer"]).tolist():
        fit = fit_edge(exchanges([other[other["peer"] == peer]], []))
        found = exchanges([own[own["peer"] == peer]], [])
        if fit is None or not len(found.at):
            continue
        expected = fit.line(found.at) - found.at
        spare = fit.round_trip_median
        outside += int(((expected < found.low - spare) | (expected > found.high + spare)).sum())
        total += len(found.at)
    return outside > _CONTRADICTING * total


def _excluded(pings: np.ndarray) -> tuple[int, int]:
    early = (pings["received"] < pings["sent"]) | (pings["returned"] < pings["answered"])
    return int(early.sum()), len(pings)


def unix_offset(meta: Mapping[str, Any]) -> int | None:
    """Wall clock minus this rank's clock in ns, from the pair of times in a trace's first note; None when
    it has none."""
    monotonic, unix = meta.get("monotonic_ns"), meta.get("unix_ns")
    if isinstance(monotonic, int) and isinstance(unix, int):
        return unix - monotonic
    return None
