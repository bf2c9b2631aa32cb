"""Perturbations of communication and of the machine: delays, drops and offsets on links, and scan's
faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.near_names import hint
from mt_megatron.parallel.group_names import NAMES as GROUP_NAMES
from mt_megatron.parallel.rank_layout import RankLayout
from mt_megatron.scan.drill.faults import parse_fault
from mt_megatron.scan.drill.inject import Injector
from mt_megatron.scan.drill.links import LinkDelays, SlowLink
from mt_megatron.scope.lab.changes import Acting
from mt_megatron.scope.lab.specification import Perturbation
from mt_megatron.scope.lab.wires import Wire, open_wire
from mt_megatron.scope.trainer import Trainer
from mt_megatron.seams import events


def require_ranks(one: Perturbation, layout: RankLayout) -> None:
    """Raise ``ConfigError`` for ranks, a group or a fault that the run does not have."""
    if one.ranks is not None and max(one.ranks) >= layout.world_size:
        raise ConfigError(f"found rank {max(one.ranks)}; expected 0 to {layout.world_size - 1}")
    if one.group is not None and one.group not in (*GROUP_NAMES, "world"):
        known = (*GROUP_NAMES, "world")
        raise ConfigError(
            f"found group: {one.group!r}; expected one of {', '.join(known)}.{hint(one.group, known)}"
        )
    if one.kind == "fault":
        parse_fault(one.fault, layout.world_size)


def acting_on_links(
    one: Perturbation, trainer: Trainer, folder: Path | None, say: Callable[[str], None]
) -> Acting | None:
    """``one`` at work on this rank; None where it does nothing here."""
    if one.kind == "fault":
        return _HostFault(one, trainer, folder or Path.cwd())
    assert one.ranks is not None
    if one.kind == "delay":
        if trainer.rank not in one.ranks:
            return None
        return _Delay(one, trainer.rank)
    return _OnWire(one, trainer.rank)


class _Delay:
    def __init__(self, one: Perturbation, rank: int) -> None:
        assert one.ranks is not None
        link = SlowLink(ranks=frozenset(one.ranks), seconds=one.figures["ms"] / 1e3, group=one.group)
        self._delays = LinkDelays(rank, [link])
        self._on = False
        self._stop = events.subscribe(self._hear, {"collective", "p2p"})

    @property
    def acted(self) -> int:
        return self._delays.held

    def before_step(self, step: int) -> None:
        self._on = True

    def rest(self) -> None:
        self._on = False

    def close(self) -> None:
        self._on = False
        self._stop()

    def _hear(self, phase: events.Phase, name: events.EventName, attrs: Any) -> None:
        if self._on:
            self._delays.hear(phase, attrs)


class _OnWire:
    def __init__(self, one: Perturbation, rank: int) -> None:
        assert one.ranks is not None
        figures = one.figures
        self._wire = Wire(
            rank=rank,
            ends=(one.ranks[0], one.ranks[1]),
            group=one.group,
            offset=figures["value"] if one.kind == "offset" else None,
            lost=int(figures["retries"]) if one.kind == "drop" else 0,
            rate=figures.get("rate", 0.0),
            timeout=figures.get("timeout_ms", 0.0) / 1e3,
            seed=one.seed,
            name=one.name,
        )
        self._close = open_wire(self._wire)

    @property
    def acted(self) -> int:
        return self._wire.dropped + self._wire.arrived

    def before_step(self, step: int) -> None:
        self._wire.on = True

    def rest(self) -> None:
        self._wire.on = False

    def close(self) -> None:
        self._wire.on = False
        self._close()


class _HostFault:
    """A fault of ``scan inject``, in the steps of the perturbation."""

    def __init__(self, one: Perturbation, trainer: Trainer, scratch: Path) -> None:
        self._fault = parse_fault(one.fault, trainer.layout.world_size)
        scratch.mkdir(parents=True, exist_ok=True)
        self._injector = Injector(trainer.rank, scratch, trainer.backend)

    @property
    def acted(self) -> int:
        return len(self._injector.faults)

    def before_step(self, step: int) -> None:
        self._injector.set([self._fault])

    def rest(self) -> None:
        pass

    def close(self) -> None:
        self._injector.close()
