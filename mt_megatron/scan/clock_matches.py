"""Events that bind clocks to each other: nobody leaves a collective before the last has entered it, and
nobody has received what was not sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mt_megatron.scan.clock_lines import Times
from mt_megatron.scan.records import ASYNC, KIND, OPEN, WAIT

SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})
"""Operations that end on no member before every member has entered them. Not ``broadcast``, which binds to
its root alone, nor ``all_to_all``, where a pair may exchange nothing."""

_MOST_ROWS = 2_000_000


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
        """Groups by number, with ``ranks``."""


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


def matched_collectives(ranks: Mapping[int, RankClockData], domains: Mapping[int, int]) -> list[Collectives]:
    """Synchronising collectives of groups whose members have more than one clock."""
    stride = _stride(ranks)
    rows: dict[tuple[int, ...], dict[int, np.ndarray]] = {}
    for rank, trace in ranks.items():
        spans = trace.spans
        names = [number for number, text in enumerate(trace.strings) if text in SYNCHRONISING]
        for number, group in trace.groups.items():
            members = tuple(group.ranks)
            if len({domains.get(each, each) for each in members}) < 2 or not set(members) <= ranks.keys():
                continue
            chosen = spans[
                (spans["kind"] == KIND["collective"])
                & (spans["group"] == number)
                & (spans["seq"] >= 0)
                & (spans["seq"] % stride == 0)
                & np.isin(spans["name"], names)
                & ((spans["flags"] & (ASYNC | WAIT)) == 0)
            ]
            rows.setdefault(members, {})[rank] = _timed(chosen, trace.meta)
    found = []
    for members, by_rank in rows.items():
        if len(by_rank) < len(members):
            continue
        tables = [_unique(by_rank[rank]) for rank in members]
        common = tables[0]["key"]
        for table in tables[1:]:
            common = np.intersect1d(common, table["key"], assume_unique=True)
        if len(common):
            picked = [table[np.searchsorted(table["key"], common)] for table in tables]
            found.append(
                Collectives(
                    ranks=members,
                    begins=np.stack([each["begin"] for each in picked]),
                    ends=np.stack([each["end"] for each in picked]),
                )
            )
    return found


def matched_transfers(ranks: Mapping[int, RankClockData], domains: Mapping[int, int]) -> list[Transfers]:
    """Sends and receives between ranks with different clocks."""
    stride = _stride(ranks)
    sent: dict[tuple[int, int], np.ndarray] = {}
    received: dict[tuple[int, int], np.ndarray] = {}
    for rank, trace in ranks.items():
        spans = trace.spans
        spans = spans[
            (spans["kind"] == KIND["p2p"])
            & (spans["peer"] >= 0)
            & (spans["seq"] >= 0)
            & (spans["seq"] % stride == 0)
        ]
        for name, table in (("send", sent), ("recv", received)):
            numbers = [number for number, text in enumerate(trace.strings) if text == name]
            # A receive has ended when nobody waits for it any more, a send has begun when it was started.
            other = ASYNC if name == "recv" else WAIT
            mine = spans[np.isin(spans["name"], numbers) & ((spans["flags"] & other) == 0)]
            for peer in np.unique(mine["peer"]).tolist():
                if domains.get(peer, peer) == domains[rank]:
                    continue
                edge = (rank, peer) if name == "send" else (peer, rank)
                table[edge] = _unique(_timed(mine[mine["peer"] == peer], trace.meta))
    found = []
    for edge in sorted(sent.keys() & received.keys()):
        out, back = sent[edge], received[edge]
        common = np.intersect1d(out["key"], back["key"], assume_unique=True)
        if len(common):
            found.append(
                Transfers(
                    source=edge[0],
                    target=edge[1],
                    sent=out["begin"][np.searchsorted(out["key"], common)],
                    received=back["end"][np.searchsorted(back["key"], common)],
                )
            )
    return found


_ROW = np.dtype([("key", "<i8"), ("begin", "<i8"), ("end", "<i8")])


def _timed(spans: np.ndarray, meta: Mapping[str, Any]) -> np.ndarray:
    """Key (step and number) and times of ``spans``, where they bind: a device that queues its work lets the
    host go on at once, so there the device's times count and spans without them do not."""
    queued = meta.get("device_type", "cpu") != "cpu"
    on_device = spans["device_end"] > 0
    spans = spans[(on_device if queued else True) & (spans["end"] != OPEN)]
    on_device = spans["device_end"] > 0
    rows = np.empty(len(spans), dtype=_ROW)
    # The step belongs to the key: a process that starts again counts from 0 again.
    rows["key"] = (spans["iteration"].astype(np.int64) << 32) | spans["seq"].astype(np.int64)
    rows["begin"] = np.where(on_device, spans["device_begin"], spans["begin"])
    rows["end"] = np.where(on_device, spans["device_end"], spans["end"])
    return rows


def _unique(rows: np.ndarray) -> np.ndarray:
    """Rows by key, without any whose key comes twice: nobody knows which belongs to which."""
    keys, first, counts = np.unique(rows["key"], return_index=True, return_counts=True)
    return rows[first[counts == 1]] if len(keys) else rows


def _stride(ranks: Mapping[int, RankClockData]) -> int:
    return sum(len(trace.spans) for trace in ranks.values()) // _MOST_ROWS + 1
