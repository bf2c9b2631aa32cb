"""Events that bind clocks to each other: nobody leaves a collective before the last has entered it, and
nobody has received what was not sent.

``check_anchors``: no work of a device begins before its host asked for it, on the host's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mt_megatron.scan.format.records import ASYNC, KIND, OPEN, WAIT

from .offset_lines import Times, robust_slope

SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})
"""Operations that end on no member before every member has entered them. Not ``broadcast``, which binds to
its root alone, nor ``all_to_all``, where a pair may exchange nothing."""

_MOST_ROWS = 32_768


class RankClockData(Protocol):
    """What of a rank's trace the clocks need; ``segments.RankTrace`` has it. Spans may be a part of those
    there are, or none: then nothing but pings is used."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """``boot_id`` and ``clock`` (ranks with equal ones share a clock), ``device_type``."""

    @property
    def pings(self) -> np.ndarray:
        """``PING`` records."""

    @property
    def spans(self) -> np.ndarray:
        """``SPAN`` records."""

    @property
    def strings(self) -> Sequence[str]:
        """Names by number."""

    @property
    def groups(self) -> Mapping[int, Any]:
        """Groups by number, with ``name`` and ``ranks``."""


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The collectives of one group that all its members recorded. Times on each rank's own clock."""

    ranks: tuple[int, ...]
    begins: Times
    """(members, collectives), ns."""

    ends: Times
    """(members, collectives), ns."""


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """What one rank sent to another and both recorded. Times on each rank's own clock."""

    source: int
    target: int
    sent: Times
    """(transfers,) ns: the send began."""

    received: Times
    """(transfers,) ns: the receive ended."""


@dataclass(frozen=True, kw_only=True)
class Bindings:
    """Everything that binds ranks with different clocks."""

    collectives: tuple[Collectives, ...] = ()
    transfers: tuple[Transfers, ...] = ()
    anchors: Mapping[int, AnchorCheck] = field(default_factory=dict)
    """Per rank, how its device's times lie on its host's clock: found in the same pass."""


def bindings(ranks: Mapping[int, RankClockData], domains: Mapping[int, int]) -> Bindings:
    """What binds the clocks of ``ranks``. Reads one rank after the other and keeps 24 bytes an event, of at
    most 32,768 events per group and edge (those whose numbers a power of two divides)."""
    # By name too: groups of the same ranks count their collectives each for itself.
    groups: dict[tuple[str, tuple[int, ...]], dict[int, np.ndarray]] = {}
    sent: dict[tuple[int, int], np.ndarray] = {}
    received: dict[tuple[int, int], np.ndarray] = {}
    anchors: dict[int, AnchorCheck] = {}
    for rank, trace in ranks.items():
        spans, strings = trace.spans, trace.strings
        found = check_anchors(spans)
        if found is not None:
            anchors[rank] = found
        mine = spans[(spans["kind"] == KIND["collective"]) & (spans["seq"] >= 0)]
        mine = mine[_named(mine, strings, SYNCHRONISING) & ((mine["flags"] & (ASYNC | WAIT)) == 0)]
        for number, group in trace.groups.items():
            members = tuple(group.ranks)
            if set(members) <= ranks.keys() and len({domains[each] for each in members}) > 1:
                rows = _timed(mine[mine["group"] == number], trace.meta)
                groups.setdefault((group.name, members), {})[rank] = rows
        mine = spans[(spans["kind"] == KIND["p2p"]) & (spans["seq"] >= 0) & (spans["peer"] >= 0)]
        # A send has begun when it was started, a receive has ended when nobody waits for it any more.
        for name, other, table in (("send", WAIT, sent), ("recv", ASYNC, received)):
            ways = mine[_named(mine, strings, {name}) & ((mine["flags"] & other) == 0)]
            for peer in np.unique(ways["peer"]).tolist():
                if peer in domains and domains[peer] != domains[rank]:
                    edge = (rank, peer) if name == "send" else (peer, rank)
                    table[edge] = _timed(ways[ways["peer"] == peer], trace.meta)
    return Bindings(
        collectives=tuple(
            each
            for (_, members), by_rank in groups.items()
            if len(by_rank) == len(members) and (each := _collectives(members, by_rank)) is not None
        ),
        transfers=tuple(
            way
            for edge in sorted(sent.keys() & received.keys())
            if (way := _transfers(edge, sent[edge], received[edge])) is not None
        ),
        anchors=anchors,
    )


def _named(spans: np.ndarray, strings: Sequence[str], wanted: Collection[str]) -> np.ndarray:
    numbers = [number for number, text in enumerate(strings) if text in wanted]
    return np.isin(spans["name"], numbers)


def _collectives(members: tuple[int, ...], by_rank: Mapping[int, np.ndarray]) -> Collectives | None:
    tables = [by_rank[rank] for rank in members]
    common = tables[0]["key"]
    for table in tables[1:]:
        common = np.intersect1d(common, table["key"], assume_unique=True)
    if not len(common):
        return None
    picked = [table[np.searchsorted(table["key"], common)] for table in tables]
    return Collectives(
        ranks=members,
        begins=np.stack([each["begin"] for each in picked]),
        ends=np.stack([each["end"] for each in picked]),
    )


def _transfers(edge: tuple[int, int], sent: np.ndarray, received: np.ndarray) -> Transfers | None:
    common = np.intersect1d(sent["key"], received["key"], assume_unique=True)
    if not len(common):
        return None
    return Transfers(
        source=edge[0],
        target=edge[1],
        sent=sent["begin"][np.searchsorted(sent["key"], common)],
        received=received["end"][np.searchsorted(received["key"], common)],
    )


_ROW = np.dtype([("key", "<i8"), ("begin", "<i8"), ("end", "<i8")])


def _timed(spans: np.ndarray, meta: Mapping[str, Any]) -> np.ndarray:
    """Key (step and number) and times of ``spans``, where they bind: a device that queues its work lets the
    host go on at once, so there the device's times count and spans without them do not. By key, without
    any whose key comes twice: nobody knows which belongs to which."""
    spans = spans[spans["end"] != OPEN]
    if meta.get("device_type", "cpu") != "cpu":
        spans = spans[spans["device_end"] > 0]
    # Powers of two: what a rank with more events keeps, one with fewer keeps as well.
    stride = 1
    while len(spans) > stride * _MOST_ROWS:
        stride *= 2
    spans = spans[spans["seq"] % stride == 0]
    on_device = spans["device_end"] > 0
    rows = np.empty(len(spans), dtype=_ROW)
    # The step belongs to the key: numbers begin anew when a process does.
    rows["key"] = (spans["iteration"].astype(np.int64) << 32) | spans["seq"].astype(np.int64)
    rows["begin"] = np.where(on_device, spans["device_begin"], spans["begin"])
    rows["end"] = np.where(on_device, spans["device_end"], spans["end"])
    _, first, counts = np.unique(rows["key"], return_index=True, return_counts=True)
    return np.asarray(rows[first[counts == 1]])


_STRETCHES = 20
TOLERATED_NS = 1_000
"""Events of a device resolve about this."""


@dataclass(frozen=True, kw_only=True)
class AnchorCheck:
    """One rank's device times beside its host's."""

    spans: int
    """Spans with device times."""

    early: int
    """Of those, begun on the device before the host began them, by more than ``TOLERATED_NS``."""

    worst: float
    """ns by which the earliest of them is early; 0 when none is."""

    drift_ppm: float
    """How much faster the device's times run: the trend of the shortest delays between host and device. Real
    queues grow and shrink; the shortest delays of long stretches do not."""

    @property
    def sound(self) -> bool:
        """Whether the times can be used: at most one span in a hundred is early."""
        return self.early <= self.spans / 100


def check_anchors(spans: np.ndarray) -> AnchorCheck | None:
    """Check ``SPAN`` records of one rank; None when none has device times."""
    timed = spans[(spans["device_end"] > 0) & (spans["end"] != OPEN)]
    if not len(timed):
        return None
    delay = timed["device_begin"] - timed["begin"]
    early = delay < -TOLERATED_NS
    order = np.argsort(timed["begin"], kind="stable")
    parts = np.array_split(order, min(_STRETCHES, len(order)))
    x = np.array([float(np.median(timed["begin"][part] - timed["begin"][order[0]])) for part in parts])
    shortest = np.array([float(delay[part].min()) for part in parts])
    return AnchorCheck(
        spans=len(timed),
        early=int(early.sum()),
        worst=float(-delay[early].min()) if early.any() else 0.0,
        drift_ppm=robust_slope(x, shortest) * 1e6 if len(parts) > 2 else 0.0,
    )
