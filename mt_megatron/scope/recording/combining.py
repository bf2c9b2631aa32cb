"""Parts of statistics of one node's ranks, held until all came or they have waited long enough."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from mt_megatron.scope.format.statistics import DERIVED, STATISTICS, Part, combined

HOLD_SECONDS = 2.0
"""Longest wait for the parts of other ranks before those that came are written; later ones are added."""

DERIVED_OF: Mapping[str, tuple[str, ...]] = {
    source: tuple(name for name, of in DERIVED.items() if of == source) for source in set(DERIVED.values())
}
"""Statistics that are made of another one's parts, by that one."""


@dataclass(frozen=True, kw_only=True)
class Combined:
    """One statistic of one step as far as this node knows it."""

    entry: int
    step: int
    session: int
    statistic: str
    parts: int
    part: Part


@dataclass(kw_only=True)
class _Held:
    statistic: str
    parts: list[Part] = field(default_factory=list)
    since: float
    written: int | None = None
    """Parts that were given away before; None: not asked yet."""


class Parts:
    """Parts of statistics that wait for those of other ranks; ``ready`` gives whole ones and late ones."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, int], _Held] = {}

    def add(self, session: int, step: int, entry: int, statistic: str, part: Part, now: float) -> None:
        """``part``: float64 vector of one rank, ``now`` in seconds of any steady clock."""
        held = self._held.get((session, step, entry))
        if held is None:
            held = self._held[session, step, entry] = _Held(statistic=statistic, since=now)
        held.parts.append(part)

    def ready(
        self,
        expected: Callable[[int, int], int],
        now: float,
        *,
        final: bool,
        written: Callable[[int, int, int], int] = lambda session, step, entry: 0,
    ) -> Iterator[Combined]:
        """Statistics of which as many parts came as are ``expected`` (session, entry), or that wait since
        ``HOLD_SECONDS``; all of them at the end (``final``). ``written`` (session, step, entry): parts that
        were given away before, which count, too."""
        for key, held in list(self._held.items()):
            session, step, entry = key
            lacks = expected(session, entry) - len(held.parts)
            if lacks > 0 and held.written is None:
                held.written = written(session, step, entry)
            if lacks <= (held.written or 0) or final or now - held.since >= HOLD_SECONDS:
                del self._held[key]
                yield Combined(
                    entry=entry,
                    step=step,
                    session=session,
                    statistic=held.statistic,
                    parts=len(held.parts),
                    part=combined(held.statistic, held.parts),
                )

    def __len__(self) -> int:
        return len(self._held)


def number(statistic: str, part: Part) -> float:
    """Number of a complete part; NaN where it has none, as of negative sums under a root."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return float(STATISTICS[statistic].value(part))
        except (ZeroDivisionError, OverflowError):
            return float("nan")


def fits(statistic: str, length: int) -> bool:
    """Whether a part of ``length`` elements has a number and combines with another one."""
    if statistic not in STATISTICS or length > 2**20:
        return False
    part = np.zeros(length)
    try:
        combined(statistic, [part, part])
        with np.errstate(all="ignore"):
            STATISTICS[statistic].value(part)
    except (IndexError, ValueError):
        return False
    return True
