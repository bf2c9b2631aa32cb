"""Ranks with known false clocks, and events between them that obey causality in true time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mt_megatron.scan.format.records import KIND, PING, SPAN
from mt_megatron.scan.format.segments import Group

START = 10**12
SECOND = 10**9
STRINGS = ("", "all_reduce", "send", "recv")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What ``fit_clocks`` reads of a rank."""

    meta: Mapping[str, Any]
    pings: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=PING))
    spans: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=SPAN))
    strings: Sequence[str] = STRINGS
    groups: Mapping[int, Group] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FalseClock:
    """True time plus ``offset`` ns, faster by ``drift``, which itself wanders by ``wander`` (ns, slowly)."""

    offset: int = 0
    drift: float = 0.0
    wander: float = 0.0

    def __call__(self, true: np.ndarray) -> np.ndarray:
        elapsed = np.asarray(true, dtype=np.float64) - START
        slow = self.wander * np.sin(elapsed / (40 * SECOND))
        return (
            np.asarray(true).astype(np.int64)
            + self.offset
            + np.rint(elapsed * self.drift + slow).astype(np.int64)
        )


def rank_on(machine: str, **others: Any) -> Rank:
    return Rank(meta={"boot_id": machine, "clock": "monotonic", "device_type": "cpu"}, **others)


def pings(
    clocks: Sequence[FalseClock],
    rank: int,
    peer: int,
    rng: np.random.Generator,
    *,
    seconds: Sequence[float] = (0, 2, 6, 14, 30, 60),
    count: int = 64,
    slow: float = 1.0,
) -> np.ndarray:
    """Rounds of exchanges at ``seconds``; each way takes 20 us and a heavy-tailed rest."""
    true = np.concatenate([START + second * SECOND + np.arange(count) * 300_000 for second in seconds])
    there, back = (
        20_000 + slow * rng.lognormal(np.log(5_000), 1.0, len(true)) + (rng.random(len(true)) < 0.02) * 2e6
        for _ in range(2)
    )
    found = np.zeros(len(true), dtype=PING)
    found["peer"] = peer
    found["sent"] = clocks[rank](true)
    found["received"] = clocks[peer](true + there)
    found["answered"] = clocks[peer](true + there + 4_000)
    found["returned"] = clocks[rank](true + there + back + 4_000)
    return found


def collectives(
    clocks: Sequence[FalseClock],
    rng: np.random.Generator,
    *,
    count: int = 2_000,
    seconds: float = 60.0,
    lag: float = 8_000.0,
) -> dict[int, np.ndarray]:
    """All ranks' spans of ``count`` all-reduces: everybody leaves a little after the last has come."""
    at = START + np.linspace(0, seconds * SECOND, count)
    begin = at + rng.uniform(0, 300_000, (len(clocks), count))
    end = begin.max(axis=0) + 2_000 + rng.exponential(lag, (len(clocks), count))
    found = {}
    for rank, clock in enumerate(clocks):
        spans = np.zeros(count, dtype=SPAN)
        spans["kind"], spans["name"], spans["group"], spans["peer"] = KIND["collective"], 1, 1, -1
        spans["seq"], spans["iteration"] = np.arange(count), np.arange(count) // 10
        spans["begin"], spans["end"] = clock(begin[rank]), clock(end[rank])
        found[rank] = spans
    return found


def transfers(
    clocks: Sequence[FalseClock],
    rng: np.random.Generator,
    source: int,
    target: int,
    *,
    count: int = 4_000,
    seconds: float = 60.0,
    fastest: float = 3_000.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Spans of the sender and of the receiver, which waits for what comes."""
    sent = START + np.linspace(0, seconds * SECOND, count)
    arrived = sent + fastest + rng.exponential(3_000.0, count)
    out, back = np.zeros(count, dtype=SPAN), np.zeros(count, dtype=SPAN)
    for spans, name, peer in ((out, 2, target), (back, 3, source)):
        spans["kind"], spans["name"], spans["peer"] = KIND["p2p"], name, peer
        spans["seq"] = np.arange(count)
    out["begin"], out["end"] = clocks[source](sent), clocks[source](sent + 1_000)
    back["begin"], back["end"] = clocks[target](sent - 50_000), clocks[target](arrived)
    return out, back


def with_spans(rank: Rank, *spans: np.ndarray, members: Sequence[int] = ()) -> Rank:
    groups = {1: Group(name="dp", ranks=tuple(members))} if members else {}
    return replace(rank, spans=np.concatenate([rank.spans, *spans]), groups={**rank.groups, **groups})


def errors(found: Any, clocks: Sequence[FalseClock], rank: int, *, seconds: float = 60.0) -> np.ndarray:
    """ns by which ``rank``'s times are wrong on rank 0's clock, over the whole time."""
    true = START + np.linspace(0, seconds * SECOND, 5_001)
    return np.abs(found.to_reference(rank, clocks[rank](true)) - clocks[0](true))
