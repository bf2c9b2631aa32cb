"""How the ranks of each kind of group lie in arrays of times, and what their links take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .faults import Fault
from .layout import Layout, Ranks
from .links import LINK_CAUSES, Links
from .noise import Floats

Values = NDArray[Any]


class Way:
    """The groups of one kind whose members are on one stage: ``tp``, ``cp`` or ``ep``."""

    def __init__(self, layout: Layout, name: str) -> None:
        self.name = name
        self._layout = layout
        self.size = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep}[name]

    def split(self, values: Values) -> Values:
        """[stages, dp, cp, tp] -> [stages, ..., members], a view."""
        if self.name == "tp":
            return values
        if self.name == "cp":
            swapped: Values = values.swapaxes(2, 3)
            return swapped
        dp, ep = self._layout.dp, self._layout.ep
        parts: Values = values.reshape(len(values), dp // ep, ep, *values.shape[2:]).transpose(0, 1, 3, 4, 2)
        return parts

    def join(self, values: Values) -> Values:
        """The reverse of ``split``."""
        if self.name == "tp":
            return values
        if self.name == "cp":
            return self.split(values)
        back = values.transpose(0, 1, 4, 2, 3)
        whole: Values = back.reshape(len(back), self._layout.dp, *back.shape[3:])
        return whole


class Tables:
    """Latency and time per byte of every kind of group, for the link faults that are on."""

    def __init__(self, layout: Layout, links: Links) -> None:
        self._layout, self._links = layout, links
        self._known: dict[tuple[object, ...], tuple[Floats, Floats]] = {}
        self._members: dict[str, Ranks] = {}
        self.faults: tuple[Fault, ...] = ()

    def begin(self, faults: Sequence[Fault]) -> None:
        """From here on these faults are on."""
        self.faults = tuple(fault for fault in faults if fault.cause in LINK_CAUSES)

    def members(self, name: str) -> Ranks:
        """Groups by rows."""
        if name not in self._members:
            self._members[name] = self._layout.members(name)
        return self._members[name]

    def ring(self, name: str) -> tuple[Floats, Floats]:
        """Latency and ns per byte of member -> next, [groups, members]."""

        def ends() -> tuple[Ranks, Ranks]:
            rows = self.members(name)
            return rows, np.roll(rows, -1, axis=-1)

        return self._between(("ring", name), ends)

    def doubling(self, name: str) -> tuple[Floats, Floats]:
        """The same of member -> member + 2^round, [groups, rounds, members]."""

        def ends() -> tuple[Ranks, Ranks]:
            rows = self.members(name)
            rounds = int(np.ceil(np.log2(rows.shape[-1])))
            targets = np.stack([np.roll(rows, -(1 << index), axis=-1) for index in range(rounds)], axis=1)
            return np.broadcast_to(rows[:, None], targets.shape), targets

        return self._between(("doubling", name), ends)

    def way_ring(self, way: Way) -> tuple[Floats, Floats]:
        """As ``ring``, in ``way``'s order of arrays, [stages, ..., members]."""

        def ends() -> tuple[Ranks, Ranks]:
            rows = way.split(self._layout.ranks())
            return rows, np.roll(rows, -1, axis=-1)

        return self._between(("way", way.name), ends)

    def way_pairs(self, way: Way) -> tuple[Floats, Floats, Floats]:
        """The same of member -> member + round + 1, [stages, ..., rounds, members], and ns per byte without
        any fault."""

        def ends() -> tuple[Ranks, Ranks]:
            rows = way.split(self._layout.ranks())
            targets = np.stack([np.roll(rows, -step, axis=-1) for step in range(1, way.size)], axis=-2)
            return np.broadcast_to(rows[..., None, :], targets.shape), targets

        usual = self._between(("pairs", way.name), ends, ())
        return *self._between(("pairs", way.name), ends), usual[1]

    def stages(self, source: int, target: int) -> tuple[Floats, Floats]:
        """The same between a stage's ranks and another's, [dp, cp, tp]."""
        ranks = self._layout.ranks()
        return self._between(("stages", source, target), lambda: (ranks[source], ranks[target]))

    def _between(
        self,
        key: tuple[object, ...],
        ends: Callable[[], tuple[Ranks, Ranks]],
        faults: tuple[Fault, ...] | None = None,
    ) -> tuple[Floats, Floats]:
        faults = self.faults if faults is None else faults
        whole = (*key, faults)
        if whole not in self._known:
            self._known[whole] = self._links.between(*ends(), faults)
        return self._known[whole]
