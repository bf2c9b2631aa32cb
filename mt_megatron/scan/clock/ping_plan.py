"""Who pings whom: machines form a tree below rank 0, with a check beside it; a machine has one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FANOUT = 16
"""Machines that ping the same one: two levels reach 273 machines, three 4,369."""


@dataclass(frozen=True, kw_only=True)
class PingPlan:
    """What every rank does. Plain enough for JSON."""

    asks: Mapping[int, tuple[int, ...]]
    """Rank -> ranks it sends pings to. The first one carries the clock, further ones only check it."""

    listens: Mapping[int, bool]
    """Ranks that answer -> whether other machines have to reach them."""

    same_machine: frozenset[int]
    """Ranks that only ask the one that speaks for their own machine."""


def ping_plan(machines: Sequence[str]) -> PingPlan:
    """The plan for ranks 0, 1, ... that run on ``machines`` (equal text, equal machine).

    The lowest rank of a machine speaks for it: it pings the one of its parent in a tree of ``FANOUT``
    children, and that of the machine before its own, which closes a triangle. The machine's other ranks
    ping it, which shows whether they share its clock.
    """
    speakers: dict[str, int] = {}
    for rank, machine in enumerate(machines):
        speakers.setdefault(machine, rank)
    order = list(speakers.values())
    asks: dict[int, tuple[int, ...]] = {}
    listens: dict[int, bool] = {}
    for rank, machine in enumerate(machines):
        speaker = speakers[machine]
        if rank != speaker:
            asks[rank] = (speaker,)
            listens.setdefault(speaker, False)
            continue
        number = order.index(rank)
        if number == 0:
            continue
        parent = (number - 1) // FANOUT
        targets = dict.fromkeys(order[each] for each in (parent, number - 1))
        asks[rank] = tuple(targets)
        listens.update(dict.fromkeys(targets, True))
    same = frozenset(range(len(machines))) - set(order)
    return PingPlan(asks=asks, listens=listens, same_machine=same)
