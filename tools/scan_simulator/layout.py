"""Where every simulated rank is: coordinates, members of groups and hosts, as arrays over ranks.

The order is Megatron-Core's (``tp-cp-ep-dp-pp``), as in ``parallel.rank_layout``, which needs torch. A rank's
number is its index in an array of shape [pp, dp, cp, tp].
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mt_megatron.errors import ConfigError

Ranks = NDArray[np.int64]

_AXES = {"pp": 0, "dp": 1, "cp": 2, "tp": 3}
_NAMES = ("tp", "dp", "pp", "cp", "ep", "dp-cp", "tp-pp", "embedding")
"""As ``parallel.group_names`` chooses among the names of equal groups."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes. Raises ``ConfigError`` when they do not fit together."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    """Model chunks per pipeline stage."""

    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size < 1:
                raise ConfigError(f"{field.name}={size}; expected a whole number of at least 1")
        if self.dp % self.ep:
            raise ConfigError(
                f"ep={self.ep} does not divide dp={self.dp}; expert ranks are data parallel ones"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"vpp={self.vpp} with pp=1; interleaving needs pp of at least 2")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[pp, dp, cp, tp]."""
        return self.pp, self.dp, self.cp, self.tp

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def hosts(self) -> int:
        """Number of machines."""
        return -(-self.world_size // self.ranks_per_node)

    def ranks(self) -> Ranks:
        """Every rank at its place, [pp, dp, cp, tp]."""
        return np.arange(self.world_size).reshape(self.shape)

    def host_of(self, rank: int) -> int:
        """The machine of ``rank``; ranks fill one machine after the other."""
        return rank // self.ranks_per_node

    def host_name(self, host: int) -> str:
        """How a trace calls a machine."""
        return f"node{host:03d}"

    def coordinates(self, rank: int) -> dict[str, int]:
        """``pp``, ``dp``, ``cp``, ``tp`` and ``ep`` of ``rank``."""
        at = dict(zip(_AXES, (int(each) for each in np.unravel_index(rank, self.shape)), strict=True))
        return {**at, "ep": at["dp"] % self.ep}

    def members(self, name: str) -> Ranks:
        """The groups called ``name`` as rows of global ranks, ascending, in the groups' order.

        Names are those of the events: ``tp``, ``cp``, ``dp``, ``pp``, ``ep``, ``dp-cp``, ``tp-pp``,
        ``embedding`` (first and last stage) and ``world``.
        """
        ranks = self.ranks()
        if name == "world":
            return ranks.reshape(1, -1)
        if name == "ep":
            split = ranks.reshape(self.pp, self.dp // self.ep, self.ep, self.cp, self.tp)
            experts: Ranks = np.moveaxis(split, 2, -1).reshape(-1, self.ep)
            return experts
        if name == "embedding":
            first_and_last = ranks[[0, -1]] if self.pp > 1 else ranks[:1]
            pairs: Ranks = first_and_last.reshape(len(first_and_last), -1).T
            return pairs
        named = [axis for key, axis in _AXES.items() if key in name.split("-")]
        others = [axis for axis in range(4) if axis not in named]
        size = int(np.prod([self.shape[axis] for axis in named]))
        rows: Ranks = ranks.transpose(*others, *named).reshape(-1, size)
        return rows

    def canonical(self, name: str) -> str:
        """What a trace calls these groups: by the first name that means the same members."""
        own = self.members(name).tolist()
        return next((each for each in _NAMES if self.members(each).tolist() == own), name)

    def pairs(self, name: str) -> list[tuple[int, int]]:
        """Pairs of ranks that send each other something directly in the groups called ``name``.

        Neighbours of the rings, of the pipelines (with the way from the last stage to the first where
        chunks interleave), and every pair of an ``ep`` group.
        """
        found = set()
        for row in self.members(name).tolist():
            size = len(row)
            ring = size if size > 2 and (name != "pp" or self.vpp > 1) else size - 1
            steps = range(1, size) if name == "ep" else (1,)
            for step in steps:
                for index in range(size if name == "ep" else ring):
                    found.add(tuple(sorted((row[index], row[(index + step) % size]))))
        return sorted(found)


def parse_layout(text: str) -> Layout:
    """``dp=4,tp=2,pp=2`` as a layout. Raises ``ConfigError`` for unknown axes and numbers."""
    sizes = {}
    names = [field.name for field in fields(Layout)]
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in names or not re.fullmatch(r"\d+", value):
            raise ConfigError(f"layout {part!r}; expected axis=number with axis out of {', '.join(names)}")
        sizes[key] = int(value)
    return Layout(**sizes)
