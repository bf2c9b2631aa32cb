"""Megatron-Core's calls under 1F1B and interleaved 1F1B, and which of them can be played at the same time.

The order of computations and of blocking exchanges is the pipeline package's; here both sides of every
transfer are matched, and the calls of all stages put into levels that need nothing of each other.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.actions import Action, Call, Kind, Placement, matching_receive, matching_send
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.upstream import upstream_calls

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one chunk, one way."""

    direction: Direction
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Transfer:
    """One message between two stages."""

    source: int
    target: int
    direction: Direction


@dataclass(frozen=True)
class Exchange:
    """Messages that a stage sends and receives in one call, which returns when all are over."""

    transfers: tuple[Transfer, ...]


Operation = Pass | Exchange


@dataclass(frozen=True)
class Level:
    """Positions in the stages' programs that can be computed together: (stage, position)."""

    kind: Literal["forward", "backward", "exchange"]
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole step of a pipeline."""

    programs: tuple[tuple[Operation, ...], ...]
    """Of each stage, in its order."""

    levels: tuple[Level, ...]
    """All places, each after what it needs."""

    partners: dict[tuple[int, int, int], tuple[int, int]] = field(repr=False)
    """(stage, position, number of the transfer there) -> (position at the other side, transfer's id)."""

    transfers: tuple[Transfer, ...] = field(repr=False)
    """By id."""

    numbers: tuple[int, ...] = field(repr=False)
    """By id: the how-many-eth of its directed edge in the step."""


def plan(stages: int, microbatches: int, chunks: int = 1) -> Plan:
    """The step's plan. Raises ``ConfigError`` where interleaving does not divide the micro-batches."""
    if chunks > 1 and microbatches % stages:
        raise ConfigError(
            f"{microbatches} micro-batches with {chunks} chunks on {stages} stages; interleaving needs a "
            "multiple of the stages"
        )
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = generate(name, ranks=stages, chunks=chunks, microbatches=microbatches)
    programs = tuple(
        tuple(_operation(schedule.placement, call) for call in calls) for calls in upstream_calls(schedule)
    )
    return _ordered(programs)


def _operation(placement: Placement, call: Call) -> Operation:
    if isinstance(call, Action):
        direction: Direction = "forward" if call.kind is Kind.F else "backward"
        return Pass(direction, call.microbatch, placement.chunk(call.stage))
    return Exchange(tuple(_transfer(placement, action) for action in call))


def _transfer(placement: Placement, action: Action) -> Transfer:
    """The message between pipeline ranks, which are this simulator's stages, that a SEND or RECV is a side
    of."""
    receives = action.kind in (Kind.RECV_F, Kind.RECV_B)
    sent = matching_send(action) if receives else action
    direction: Direction = "forward" if sent.kind is Kind.SEND_F else "backward"
    target = matching_receive(sent).stage
    return Transfer(placement.rank(sent.stage), placement.rank(target), direction)


def _ordered(programs: tuple[tuple[Operation, ...], ...]) -> Plan:
    """Match both sides of every transfer, and find an order in which nothing waits for what comes later."""
    partners, transfers, numbers = _matched(programs)
    at = [0] * len(programs)
    levels: list[Level] = []
    while any(position < len(programs[stage]) for stage, position in enumerate(at)):
        places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for stage, position in enumerate(at):
            if position == len(programs[stage]):
                continue
            operation = programs[stage][position]
            if isinstance(operation, Pass):
                places[operation.direction].append((stage, position))
            elif all(
                at[_other(transfer, stage)] >= partners[stage, position, index][0]
                for index, transfer in enumerate(operation.transfers)
            ):
                places["exchange"].append((stage, position))
        if not places:
            raise AssertionError(f"the stages wait for each other at {at}")
        for kind in ("exchange", "forward", "backward"):
            if kind in places:
                levels.append(Level(kind, tuple(places[kind])))
                for stage, _ in places[kind]:
                    at[stage] += 1
    return Plan(
        programs=programs,
        levels=tuple(levels),
        partners=partners,
        transfers=tuple(transfers),
        numbers=tuple(numbers),
    )


def _other(transfer: Transfer, stage: int) -> int:
    return transfer.target if transfer.source == stage else transfer.source


def _matched(
    programs: tuple[tuple[Operation, ...], ...],
) -> tuple[dict[tuple[int, int, int], tuple[int, int]], list[Transfer], list[int]]:
    sides: dict[tuple[Transfer, bool], list[tuple[int, int, int]]] = defaultdict(list)
    for stage, program in enumerate(programs):
        for position, operation in enumerate(program):
            if isinstance(operation, Exchange):
                for index, transfer in enumerate(operation.transfers):
                    sides[transfer, transfer.source == stage].append((stage, position, index))
    partners: dict[tuple[int, int, int], tuple[int, int]] = {}
    transfers: list[Transfer] = []
    numbers: list[int] = []
    on_edge: dict[tuple[int, int], list[tuple[tuple[int, int, int], int]]] = defaultdict(list)
    for (transfer, is_send), senders in list(sides.items()):
        if not is_send:
            continue
        receivers = sides[transfer, False]
        if len(receivers) != len(senders):
            raise AssertionError(f"{len(senders)} sends and {len(receivers)} receives of {transfer}")
        for sender, receiver in zip(senders, receivers, strict=True):
            identity = len(transfers)
            partners[sender] = receiver[1], identity
            partners[receiver] = sender[1], identity
            transfers.append(transfer)
            numbers.append(0)
            on_edge[transfer.source, transfer.target].append((sender, identity))
    for places in on_edge.values():
        for number, (_, identity) in enumerate(sorted(places)):
            numbers[identity] = number
    return partners, transfers, numbers
