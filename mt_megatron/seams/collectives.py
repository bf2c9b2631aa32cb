"""Collectives and transfers announce themselves as events: among whom, the how-manieth, how many bytes.

    with collectives.announced("all_reduce", "tp", group, tensor):
        dist.all_reduce(tensor, group=group)

What it takes is computed only while somebody listens (``seams.events``). Numbers are counted per name and
membership of a group, and per directed edge for transfers, from ``restart_numbers`` on; as all members make
the same calls in the same order, equal numbers are one operation. Nothing is sent to find them.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from . import events

Transfer = tuple[str, int, int, int]
"""``send`` or ``recv``, the other side's global rank, number on the directed edge, bytes (-1: not known)."""

Part = Literal["start", "wait"]


class Group:
    """Members of a process group under one name, and how many collectives they were heard to make."""

    __slots__ = ("_numbers", "name", "ranks")

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        """Global ranks in the group's order."""

        # Threads of autograd count too; ``next`` of a count is one step of the interpreter.
        self._numbers = itertools.count()

    def number(self) -> int:
        """Number of the collective that begins now."""
        return next(self._numbers)

    def restart(self) -> None:
        """Begin again at 0."""
        self._numbers = itertools.count()


_groups: dict[tuple[str, tuple[int, ...]], Group] = {}
# Process groups by identity, as they do not live for ever: the weak reference tells a new one that was
# put at an old one's address.
_seen: dict[tuple[str, int], tuple[weakref.ref[Any], Group]] = {}
_sent: dict[int, itertools.count[int]] = {}
_received: dict[int, itertools.count[int]] = {}


def group_of(name: str, group: Any = None) -> Group:
    """The ``Group`` of a process group (None: the default one), always the same for a name and members."""
    if group is None:
        group = dist.group.WORLD
    found = _seen.get((name, id(group)))
    if found is not None and found[0]() is group:
        return found[1]
    ranks = tuple(dist.get_process_group_ranks(group))
    made = _groups.setdefault((name, ranks), Group(name, ranks))
    _seen[name, id(group)] = (weakref.ref(group), made)
    return made


def restart_numbers() -> None:
    """Number everything from 0 again: where several ranks begin to listen at the same point of the program.

    Each may have counted for listeners of its own before, or counted on where others did not.
    """
    for group in tuple(_groups.values()):
        group.restart()
    _sent.clear()
    _received.clear()


def known_groups() -> list[Group]:
    """Every group that was heard of."""
    return list(_groups.values())


def described(op: str, name: str, group: Any, size: int) -> dict[str, Any]:
    """Attributes of a ``collective`` of ``size`` bytes that begins now; counts it. Only while somebody
    listens."""
    members = group_of(name, group)
    return {"op": op, "group": name, "ranks": members.ranks, "seq": members.number(), "bytes": size}


def announced(op: str, name: str, group: Any, *given: Tensor) -> AbstractContextManager[None]:
    """A ``collective`` event around a call that returns when the operation is over.

    ``given`` is what this rank gives into it. Nothing where the group has one member.
    """
    if not events.listening() or _alone(group):
        return events.IDLE
    return events.described("collective", described(op, name, group, size_of(*given)))


def part(attrs: dict[str, Any] | None, which: Part) -> AbstractContextManager[None]:
    """The ``start`` of a collective that goes on in the background, or the ``wait`` for it; ``attrs``
    are its ``described``, or None where nobody listened when it started."""
    if attrs is None or not events.listening():
        return events.IDLE
    return events.described("collective", {**attrs, "asynchronous": which})


def sent(peer: int, size: int) -> Transfer:
    """The transfer to global rank ``peer`` that begins now; counts it."""
    return ("send", peer, _next(_sent, peer), size)


def received(peer: int, size: int) -> Transfer:
    """The transfer from global rank ``peer`` that begins now; counts it."""
    return ("recv", peer, _next(_received, peer), size)


def reserve_sent(peer: int, count: int) -> int:
    """The number of the first of ``count`` transfers to ``peer``, for sides that count all of a step's."""
    return _reserved(_sent, peer, count)


def reserve_received(peer: int, count: int) -> int:
    """The same for transfers from ``peer``."""
    return _reserved(_received, peer, count)


def size_of(*tensors: Tensor | None) -> int:
    """Bytes of ``tensors``; None counts nothing."""
    size = 0
    for tensor in tensors:
        if tensor is not None:
            size += tensor.nbytes
    return size


def _alone(group: Any) -> bool:
    # Asked of the group itself: torch's function takes as long as all the rest.
    members: Any = dist.group.WORLD if group is None else group
    return bool(members.size() == 1)


def _next(edges: dict[int, itertools.count[int]], peer: int) -> int:
    numbers = edges.get(peer)
    if numbers is None:
        numbers = edges.setdefault(peer, itertools.count())
    return next(numbers)


def _reserved(edges: dict[int, itertools.count[int]], peer: int, count: int) -> int:
    first = _next(edges, peer)
    edges[peer] = itertools.count(first + count)
    return first
