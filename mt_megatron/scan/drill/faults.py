"""Which faults can be asked for, as text and as data: ``slow_compute:rank=3,factor=1.5``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mt_megatron.errors import ConfigError

KINDS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "slow_compute": ("every forward and backward of the rank does so many times its work", {"factor": 1.5}),
    "slow_link": ("every transfer between the two ranks takes so much longer", {"latency_ms": 5.0}),
    "jitter": ("random waits of this mean before every forward and backward", {"ms": 5.0}),
    "host_pause": ("the process is stopped for so long, again and again", {"seconds": 1.0, "every": 5.0}),
    "slow_data": ("every wait for data has so much writing to the disk in it", {"ms": 50.0}),
    "host_contention": ("so many busy processes on the rank's own processors", {"processes": 2.0}),
    "uneven_work": ("the routers send the rank's experts more tokens: added to their scores", {"bias": 2.0}),
}
"""Kind, named as the cause that the diagnosis finds -> what it does, and its figures with what they are when
left out."""

FORMER_KINDS: Mapping[str, str] = {
    "slow_rank": "slow_compute",
    "pause": "host_pause",
    "slow_disk": "slow_data",
    "busy_host": "host_contention",
}
"""Former names, which are still read -> kinds."""

FORMER_FIGURES: Mapping[tuple[str, str], str] = {("slow_link", "ms"): "latency_ms"}
"""Kind and the former name of a figure, which is still read -> the figure's name, as the simulator has it."""

LONGEST_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is to go wrong."""

    kind: str
    ranks: tuple[int, ...]
    """Who has it; the two ends of a link."""

    figures: Mapping[str, float]
    """By name, complete."""

    def text(self) -> str:
        """As ``parse_fault`` reads it."""
        name = "ranks" if self.kind == "slow_link" else "rank"
        figures = "".join(f",{key}={value:g}" for key, value in self.figures.items())
        return f"{self.kind}:{name}={'-'.join(map(str, self.ranks))}{figures}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def parse_fault(text: str, world_size: int | None = None) -> Fault:
    """What ``text`` asks for. Raises ``ConfigError``."""
    kind, _, rest = text.partition(":")
    kind = FORMER_KINDS.get(kind, kind)
    if kind not in KINDS:
        raise ConfigError(f"found the fault {kind!r} in {text!r}; expected one of {', '.join(KINDS)}")
    figures = dict(KINDS[kind][1])
    ranks: tuple[int, ...] | None = None
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        key = FORMER_FIGURES.get((kind, key), key)
        if key in ("rank", "ranks") and equals:
            ranks = _ranks(value, text)
        elif key in figures and equals:
            figures[key] = _figure(value, key, text)
        else:
            expected = ", ".join(("rank", *figures))
            raise ConfigError(f"found {pair!r} in {text!r}; expected NAME=VALUE with one of {expected}")
    if ranks is None:
        raise ConfigError(f"found no rank in {text!r}; expected {kind}:{_example(kind)}")
    if kind == "slow_link" and (len(ranks) != 2 or ranks[0] == ranks[1]):
        raise ConfigError(f"found ranks {ranks} for the link in {text!r}; expected two, such as ranks=1-2")
    if world_size is not None and max(ranks) >= world_size:
        raise ConfigError(f"found rank {max(ranks)} in {text!r}; expected 0 to {world_size - 1}")
    if figures.get("factor", 1.0) < 1.0:
        raise ConfigError(f"found factor={figures['factor']:g} in {text!r}; expected at least 1")
    if kind == "host_pause" and figures["every"] <= figures["seconds"]:
        raise ConfigError(f"found every={figures['every']:g} in {text!r}; expected more than seconds")
    return Fault(kind=kind, ranks=ranks, figures=figures)


def faults_from(records: Sequence[Mapping[str, Any]]) -> tuple[Fault, ...]:
    """What ``to_dict`` gave, checked again: the file may be anybody's. Raises ``ConfigError``."""
    found = []
    for record in records:
        try:
            one = Fault(
                kind=str(record["kind"]), ranks=tuple(record["ranks"]), figures=dict(record["figures"])
            )
            found.append(parse_fault(one.text()))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"found {record!r}; expected a fault's kind, ranks and figures") from error
    return tuple(found)


def _ranks(value: str, text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(each) for each in value.split("-"))
    except ValueError:
        ranks = (-1,)
    if min(ranks) < 0:
        raise ConfigError(f"found rank={value} in {text!r}; expected numbers from 0, joined by '-'")
    return ranks


def _figure(value: str, key: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number <= LONGEST_SECONDS * 1000:
        raise ConfigError(f"found {key}={value} in {text!r}; expected a number above 0")
    return number


def _example(kind: str) -> str:
    who = "ranks=1-2" if kind == "slow_link" else "rank=1"
    return ",".join((who, *(f"{key}={value:g}" for key, value in KINDS[kind][1].items())))
