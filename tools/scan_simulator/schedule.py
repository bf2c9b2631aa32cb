"""Pipeline schedules as data: what each stage does in which order, and what may run at the same time.

Plain 1F1B and its interleaved form (arXiv:2104.04473), with blocking transfers that both sides must have
reached, as ``batch_isend_irecv`` and its wait are.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from mt_megatron.errors import ConfigError

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
    make = _interleaved if chunks > 1 else _plain
    programs = tuple(tuple(make(stage, stages, microbatches, chunks)) for stage in range(stages))
    return _ordered(programs)


def _forward_out(stage: int, stages: int) -> Transfer:
    return Transfer(stage, (stage + 1) % stages, "forward")


def _forward_in(stage: int, stages: int) -> Transfer:
    return Transfer((stage - 1) % stages, stage, "forward")


def _backward_out(stage: int, stages: int) -> Transfer:
    return Transfer(stage, (stage - 1) % stages, "backward")


def _backward_in(stage: int, stages: int) -> Transfer:
    return Transfer((stage + 1) % stages, stage, "backward")


def _exchange(*wanted: tuple[bool, Transfer]) -> list[Operation]:
    transfers = tuple(transfer for holds, transfer in wanted if holds)
    return [Exchange(transfers)] if transfers else []


def _plain(stage: int, stages: int, microbatches: int, chunks: int) -> list[Operation]:
    """1F1B: as many forwards ahead as stages follow, then one forward and one backward in turn."""
    first, last = stage == 0, stage == stages - 1
    ahead = min(stages - stage - 1, microbatches)
    out, into = _forward_out(stage, stages), _forward_in(stage, stages)
    back, gradient = _backward_out(stage, stages), _backward_in(stage, stages)
    made: list[Operation] = []
    for number in range(ahead):
        made += [*_exchange((not first, into)), Pass("forward", number, 0), *_exchange((not last, out))]
    if ahead < microbatches:
        made += _exchange((not first, into))
    for number in range(microbatches - ahead):
        ends = number == microbatches - ahead - 1
        made += [Pass("forward", number + ahead, 0), *_exchange((not last, out), (not last, gradient))]
        made += [Pass("backward", number, 0), *_exchange((not first, back), (not first and not ends, into))]
    for number in range(microbatches - ahead, microbatches):
        made += [*_exchange((not last, gradient)), Pass("backward", number, 0), *_exchange((not first, back))]
    return made


def _interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> list[Operation]:
    """Groups of as many micro-batches as stages go through one chunk after another."""
    first, last, total = stage == 0, stage == stages - 1, microbatches * chunks
    ahead = total if microbatches == stages else min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)

    def chunk_at(index: int) -> int:
        return index % (stages * chunks) // stages

    def one(direction: Direction, index: int) -> Pass:
        chunk = chunk_at(index)
        microbatch = index // (stages * chunks) * stages + index % stages
        return Pass(direction, microbatch, chunk if direction == "forward" else chunks - 1 - chunk)

    def sends_on(index: int) -> tuple[bool, Transfer]:
        return not (last and chunk_at(index) == chunks - 1), _forward_out(stage, stages)

    def sends_back(index: int) -> tuple[bool, Transfer]:
        return not (first and chunk_at(index) == chunks - 1), _backward_out(stage, stages)

    into, gradient = _forward_in(stage, stages), _backward_in(stage, stages)
    made: list[Operation] = _exchange((not first, into))
    for index in range(ahead):
        more = index < total - 1 and not (first and chunk_at(index + 1) == 0)
        turn = index == ahead - 1 and ahead < total and not last
        made += [one("forward", index), *_exchange(sends_on(index), (more, into), (turn, gradient))]
    for index in range(total - ahead):
        ends = index == total - ahead - 1
        # The far end of the pipeline is this many iterations behind.
        into_first = chunk_at(index + ahead - (stages - 1)) != chunks - 1
        into_last = chunk_at(index - (stages - 1)) != chunks - 1
        made += [one("forward", index + ahead), one("backward", index)]
        made += _exchange(
            sends_on(index + ahead),
            sends_back(index),
            (not ends and (into_first if first else True), into),
            (into_last if last else True, gradient),
        )
    if ahead == total:
        made += _exchange((not last, gradient))
    for index in range(total - ahead, total):
        more = index < total - 1 and (chunk_at(index - (stages - 1)) != chunks - 1 if last else True)
        made += [one("backward", index), *_exchange(sends_back(index), (more, gradient))]
    return made


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
