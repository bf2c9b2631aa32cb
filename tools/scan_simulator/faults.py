"""Faults of a simulated run: what can be wrong, with which figures, and since when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.scan.drill.faults import FORMER_KINDS

from .layout import Layout

_COMMON = ("first", "last")
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "slow_compute": ("rank", "factor"),
    "host_contention": ("rank", "share", "mode"),
    "host_pause": ("rank", "seconds", "every", "mode"),
    "slow_data": ("rank", "factor"),
    "slow_checkpoint": ("rank", "factor"),
    "uneven_work": ("rank", "factor"),
    "slow_link": ("ranks", "latency_ms", "bandwidth"),
    "slow_group": ("group", "rank", "latency_ms", "bandwidth"),
    "slow_node_link": ("host", "latency_ms", "bandwidth"),
    "hang": ("rank",),
}
_MODES = {"host_contention": ("load", "quota"), "host_pause": ("stop", "gc")}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, on from ``first`` to ``last`` (steps, from 1; None: to the end).

    Raises ``ConfigError`` for figures that mean no such fault.
    """

    cause: str
    rank: int | None = None
    """Whose compute, host, data, disk or work it is; of ``slow_group`` any member."""

    ranks: tuple[int, int] | None = None
    """``slow_link``: the two ends; both directions are slow."""

    group: str | None = None
    """``slow_group``: ``tp``, ``dp`` ...: every link within the one that ``rank`` is in."""

    host: int | None = None
    """``slow_node_link``: every link across the border of this machine."""

    factor: float = 1.2
    """Times as long per unit of work (compute, data, checkpoint), or as much work (``uneven_work``)."""

    share: float = 0.3
    """``host_contention``: the part of a processor that others take, or that a quota keeps."""

    mode: str = ""
    """``load`` or ``quota``; ``stop`` (the whole process) or ``gc`` (its Python thread, and it says so)."""

    seconds: float = 0.5
    """``host_pause``: how long each."""

    every: int = 1
    """``host_pause``: one in so many steps."""

    latency_ms: float = 0.0
    """Links: what a message takes longer."""

    bandwidth: float = 1.0
    """Links: the part of the bandwidth that is left."""

    first: int = 1
    last: int | None = None

    def __post_init__(self) -> None:
        if self.cause not in _OPTIONS:
            raise ConfigError(f"fault {self.cause!r}; expected one of {', '.join(_OPTIONS)}")
        for name in ("rank", "ranks", "host", "group"):
            if name in _OPTIONS[self.cause] and getattr(self, name) is None:
                raise ConfigError(f"fault {self.cause} says no {name}; add {name}=")
        modes = _MODES.get(self.cause, ("",))
        if not self.mode:
            object.__setattr__(self, "mode", modes[0])
        checks = {
            f"mode={self.mode!r}; expected one of {', '.join(modes)}": self.mode in modes,
            f"factor={self.factor}; expected more than 1": self.factor > 1,
            f"share={self.share}; expected between 0 and 1": 0 < self.share < 1,
            f"seconds={self.seconds}; expected more than 0": self.seconds > 0,
            f"every={self.every}; expected at least 1": self.every >= 1,
            f"bandwidth={self.bandwidth}; expected a part of 1": 0 < self.bandwidth <= 1,
            f"latency_ms={self.latency_ms}; expected at least 0": self.latency_ms >= 0,
            f"first={self.first}, last={self.last}; expected steps from 1 on in order": self.first >= 1
            and (self.last is None or self.last >= self.first),
            "neither latency_ms nor bandwidth; a link is slow by one of them": "bandwidth"
            not in _OPTIONS[self.cause]
            or self.latency_ms > 0
            or self.bandwidth < 1,
        }
        for text, holds in checks.items():
            if not holds:
                raise ConfigError(f"fault {self.cause}: {text}")

    def on(self, step: int) -> bool:
        """Whether it is there in ``step``."""
        return self.first <= step and (self.last is None or step <= self.last)

    def check(self, layout: Layout, steps: int) -> None:
        """Raise ``ConfigError`` when ``layout`` has no such rank, pair, group or machine, or none begins."""
        world = layout.world_size
        for rank in (self.rank, *(self.ranks or ())):
            if rank is not None and not 0 <= rank < world:
                raise ConfigError(f"fault {self.cause}: rank {rank} is not in 0..{world - 1}")
        if self.first > steps:
            raise ConfigError(f"fault {self.cause} begins in step {self.first}; the run has {steps}")
        if self.ranks is not None and self.ranks not in used_pairs(layout):
            raise ConfigError(
                f"fault {self.cause}: ranks {self.ranks[0]}-{self.ranks[1]} never send each other anything "
                "in this layout; choose neighbours of a ring or pipeline, or two ranks of an ep group"
            )
        if self.cause == "slow_group" and len(self.culprits(layout)) < 2:
            raise ConfigError(
                f"fault {self.cause}: group {self.group!r} of rank {self.rank} has no links here"
            )
        if self.host is not None and not (0 <= self.host < layout.hosts and layout.hosts > 1):
            raise ConfigError(
                f"fault {self.cause}: host {self.host} of {layout.hosts}; expected one of several machines "
                "(see ranks_per_node of the layout)"
            )
        if self.cause == "uneven_work" and layout.ep == 1 and layout.dp == 1:
            raise ConfigError("fault uneven_work: needs ep or dp above 1; nobody else has work of its own")

    def culprits(self, layout: Layout) -> tuple[int, ...]:
        """Global ranks at fault, ascending. Uneven work without experts is that of a whole replica."""
        if self.ranks is not None:
            return tuple(sorted(self.ranks))
        if self.host is not None:
            return tuple(rank for rank in range(layout.world_size) if layout.host_of(rank) == self.host)
        assert self.rank is not None
        if self.group is not None:
            rows = layout.members(self.group).tolist()
            return tuple(sorted(next(row for row in rows if self.rank in row)))
        if self.cause == "uneven_work" and layout.ep == 1:
            replica = layout.ranks()[:, layout.coordinates(self.rank)["dp"]]
            return tuple(sorted(replica.ravel().tolist()))
        return (self.rank,)

    def groups(self, layout: Layout) -> tuple[str, ...]:
        """Kinds of groups in which a slow link carries something; of other faults none."""
        if self.ranks is None:
            return (self.group,) if self.group else ()
        return tuple(name for name in _kinds(layout) if tuple(sorted(self.ranks)) in layout.pairs(name))

    def truth(self, layout: Layout) -> dict[str, Any]:
        """The label: plain values for JSON."""
        host = self.host if self.host is not None else None
        return {
            **asdict(self),
            "culprits": list(self.culprits(layout)),
            "groups": list(self.groups(layout)),
            "host_name": None if host is None else layout.host_name(host),
        }


def used_pairs(layout: Layout) -> dict[tuple[int, int], tuple[str, ...]]:
    """Every pair of ranks that sends each other something large, and in which kinds of groups."""
    found: dict[tuple[int, int], list[str]] = {}
    for name in _kinds(layout):
        for pair in layout.pairs(name):
            found.setdefault(pair, []).append(name)
    return {pair: tuple(names) for pair, names in found.items()}


def _kinds(layout: Layout) -> tuple[str, ...]:
    gradients = "dp-cp" if layout.cp > 1 else "dp"
    sizes = {
        "pp": layout.pp,
        "tp": layout.tp,
        gradients: layout.dp * layout.cp,
        "cp": layout.cp,
        "ep": layout.ep,
    }
    return tuple(name for name, size in sizes.items() if size > 1)


def parse_fault(text: str) -> Fault:
    """``slow_compute:rank=3,factor=1.2,first=20`` as a fault. Raises ``ConfigError``."""
    cause, _, rest = text.partition(":")
    cause = FORMER_KINDS.get(cause, cause)
    if cause not in _OPTIONS:
        raise ConfigError(f"fault {cause!r}; expected one of {', '.join(_OPTIONS)}")
    expected = (*_OPTIONS[cause], *_COMMON)
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in expected:
            raise ConfigError(
                f"fault {cause}: found {part!r}; expected {', '.join(f'{each}=' for each in expected)}"
            )
        try:
            values[key] = _parsed(key, value)
        except ValueError:
            raise ConfigError(f"fault {cause}: {key}={value!r} is not what {key} takes") from None
    return Fault(cause=cause, **values)


def _parsed(key: str, value: str) -> Any:
    if key in ("rank", "host", "every", "first", "last"):
        return int(value)
    if key == "ranks":
        low, high = sorted(int(each) for each in value.split("-"))
        return low, high
    return value if key in ("group", "mode") else float(value)
