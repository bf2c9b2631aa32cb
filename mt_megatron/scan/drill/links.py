"""Communication between two ranks that takes longer: the one mechanism of drills and of the scope's lab.

A blocking operation is held up where it begins. One that was only started is over no earlier than so long
after its start, as on a slow link: whoever computes meanwhile and waits late loses nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_STARTED = 4_096


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """What is to take how much longer."""

    ranks: frozenset[int]
    """The two ends."""

    seconds: float

    group: str | None = None
    """Name of groups whose collectives are meant too, where both ends are members; None: transfers between
    the two and collectives of the two alone."""


class LinkDelays:
    """Holds up the ``collective`` and ``p2p`` events of one rank that go over its slow links."""

    def __init__(self, rank: int, links: Sequence[SlowLink]) -> None:
        self.held = 0
        """Operations that were held up so far."""

        self._links = [
            (link, next((each for each in link.ranks if each != rank), -1))
            for link in links
            if rank in link.ranks
        ]
        self._local = threading.local()
        self._until: dict[Any, float] = {}
        """When an operation that was started may be over, by what names it."""

    def hear(self, phase: str, attrs: Mapping[str, Any]) -> bool:
        """Take a begin or end in the calling thread; whether the outermost operation of the thread began
        or ended."""
        depth = getattr(self._local, "depth", 0) + (1 if phase == "begin" else -1)
        self._local.depth = max(0, depth)
        if phase == "end":
            return depth == 0
        if depth == 1:
            self._hold(attrs)
        return depth == 1

    def _hold(self, attrs: Mapping[str, Any]) -> None:
        for number, (link, peer) in enumerate(self._links):
            keys = _crossing(attrs, link, peer)
            if not keys:
                continue
            self.held += 1
            part = attrs.get("asynchronous")
            if part == "start":
                until = time.perf_counter() + link.seconds
                for key in keys:
                    self._until[number, key] = until
                while len(self._until) > _MOST_STARTED:
                    self._until.pop(next(iter(self._until)))
            elif part == "wait":
                until = max((self._until.pop((number, key), 0.0) for key in keys), default=0.0)
                time.sleep(max(0.0, until - time.perf_counter()))
            else:
                time.sleep(link.seconds)


def _crossing(attrs: Mapping[str, Any], link: SlowLink, peer: int) -> list[Any]:
    """Names of the parts of an operation that go over the link: transfers with the other end, or the
    collective."""
    transfers = attrs.get("transfers")
    if transfers is not None:
        return [(op, other, number) for op, other, number, _ in transfers if other == peer]
    ranks = attrs.get("ranks")
    if ranks is None:
        return []
    members = frozenset(ranks)
    named = link.group is not None and link.group == attrs.get("group")
    if members == link.ranks or (named and link.ranks <= members):
        return [(attrs.get("group"), ranks, attrs.get("seq"))]
    return []
