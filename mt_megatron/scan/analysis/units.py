"""Groups and edges whose transfer times are compared, and one in which they are slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .matched_ops import Rows, Samples
from .trace import Place

LEAST_LOSS = 0.004
"""Of the step: what costs less is not told."""

LEAST_EXTRA_NS = 2e4
"""Per operation: below this it is the host's scheduling, not the network."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A process group, or an edge in one direction."""

    name: str
    """``tp``, ``dp`` ...; of edges what they join: ``pp``, ``cp`` or ``p2p``."""

    ranks: tuple[int, ...]
    """In ring order; of an edge the sender and the receiver."""

    is_edge: bool
    crosses: bool
    """Whether its members are on more than one node."""

    rows: Rows
    samples: Samples | None
    """Of the operation that takes most time."""

    clock_error: float
    others: tuple[Samples, ...] = ()
    """Of operations of another name."""


@dataclass(frozen=True, kw_only=True)
class SlowUnit:
    """A unit in a stretch of steps in which its transfers take clearly longer."""

    unit: Unit
    ratio: float
    """How many times as long."""

    confidence: float
    """That it is slow, wherever in it."""

    first_step: int
    last_step: int
    lost_ns: float
    """Per step."""

    extra_ns: float
    """Per operation."""

    healthy_ns: float
    """What the operation that costs most takes elsewhere, or took before."""

    by_past: bool
    """Compared with its own past: nothing like it ran beside it, or it became as slow."""

    everywhere: bool = False
    """Its peers became as slow at the same time."""

    pair: tuple[int, int] | None = None
    """The two ranks whose link is slow, where that is how it was found."""

    trust: float = 1.0
    said: str = ""
    """What speaks for ``pair``."""

    certainty: float | None = None
    """Standard errors of its whole times; None where only a pattern of its members' exits tells of it."""


def edge_name(places: Callable[[int], Place], sender: int, receiver: int) -> str:
    """What an edge joins."""
    one, other = places(sender), places(receiver)
    if one.pp != other.pp:
        return "pp"
    return "cp" if one.cp != other.cp else "p2p"
