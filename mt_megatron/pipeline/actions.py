"""The intermediate representation of a pipeline schedule: ordered actions per rank, and where stages lie.

A schedule names computations (F, B, W) and, once ``lowered``, transfers (SEND, RECV) and gradient
reductions (REDUCE). It knows nothing of tensors, times or processes: a generator makes it, the validator
checks it, the simulator times it, the executor runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Kind(str, Enum):
    """Kind of an action."""

    computes: bool
    """True for F, B and W."""

    def __init__(self, letters: str) -> None:
        self.computes = letters in ("F", "B", "W")

    # The same number as Enum's, whose hash is a function in Python: actions are looked up by the million.
    __hash__ = str.__hash__

    F = "F"
    """Forward of one micro-batch through one stage."""
    B = "B"
    """Backward. Gradients of the input alone where a W of the same stage and micro-batch follows in the
    schedule; otherwise gradients of input and weights."""
    W = "W"
    """Gradients of the weights that an earlier B deferred."""
    SEND_F = "SEND_F"
    """Start sending the stage's output to the next stage; returns before the transfer ends."""
    RECV_F = "RECV_F"
    """Make a buffer for the stage's input ready to be received; the F that needs it waits for it."""
    SEND_B = "SEND_B"
    """Start sending the gradient of the stage's input to the previous stage."""
    RECV_B = "RECV_B"
    """Make a buffer for the gradient of the stage's output ready; the B that needs it waits for it."""
    REDUCE = "REDUCE"
    """Start the data-parallel reduction of the stage's weight gradients."""


KINDS = tuple(Kind)
"""Kinds by their number in ``Columns.kinds``."""

F, B, W, SEND_F, RECV_F, SEND_B, RECV_B, REDUCE = range(len(KINDS))
"""Their numbers by name."""

_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class Action(NamedTuple):
    """One action of one rank. ``microbatch`` is -1 for REDUCE, which belongs to a whole stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.microbatch < 0 else self.microbatch}"


class Columns(NamedTuple):
    """Actions as arrays, [actions]: what whole schedules are looked through with."""

    kinds: npt.NDArray[np.int8]
    """Places in ``KINDS``."""

    stages: npt.NDArray[np.int32]
    microbatches: npt.NDArray[np.int32]
    """-1 for REDUCE."""


def columns(actions: Sequence[Action]) -> Columns:
    """``actions`` as arrays."""
    if not actions:
        return Columns(np.zeros(0, np.int8), np.zeros(0, np.int32), np.zeros(0, np.int32))
    kinds, stages, microbatches = zip(*actions, strict=True)
    return Columns(
        np.fromiter(map(_NUMBERS.__getitem__, kinds), np.int8, len(kinds)),
        np.array(stages, np.int32),
        np.array(microbatches, np.int32),
    )


Call = Action | tuple[Action, ...]
"""An action, or SENDs and RECVs that a rank waits for until they are over, beginning those that have not
begun yet: a blocking exchange."""


class Style(str, Enum):
    """Order in which stages are laid over ranks."""

    LOOP = "loop"
    """Stage s lies on rank s mod P as its chunk s div P (Megatron-Core's placement)."""
    V = "v"
    """Two chunks: stages 0 to P-1 on ranks 0 to P-1, stages P to 2P-1 back from rank P-1 to 0."""


@dataclass(frozen=True)
class Placement:
    """Rank and chunk of each of ``stages`` = ranks x chunks stages. Ranks count within one pipeline."""

    ranks: int
    chunks: int = 1
    style: Style = Style.LOOP

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.chunks < 1:
            raise ValueError(
                f"found {self.ranks} ranks and {self.chunks} chunks; expected at least 1 of each"
            )
        if self.style is Style.V and self.chunks != 2:
            raise ValueError(f"found {self.chunks} chunks in a V placement; expected 2")

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank(self, stage: int) -> int:
        if self.style is Style.V and stage >= self.ranks:
            return 2 * self.ranks - 1 - stage
        return stage % self.ranks

    def chunk(self, stage: int) -> int:
        return stage // self.ranks

    def stage(self, rank: int, chunk: int) -> int:
        if self.style is Style.V and chunk == 1:
            return 2 * self.ranks - 1 - rank
        return chunk * self.ranks + rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of ``rank``, by chunk."""
        return tuple(self.stage(rank, chunk) for chunk in range(self.chunks))


@dataclass(frozen=True)
class Schedule:
    """One step of a pipeline. ``ranks[r]`` lists the actions of rank r in the order in which it starts
    them. Computations of one rank run one after another; transfers and reductions run beside them."""

    name: str
    placement: Placement
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    @cached_property
    def splits_backward(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) of each B whose weight gradients a W computes."""
        found: set[tuple[int, int]] = set()
        for kinds, stages, microbatches in self.columns:
            found.update(zip(stages[kinds == W].tolist(), microbatches[kinds == W].tolist(), strict=True))
        return frozenset(found)

    @cached_property
    def split_table(self) -> npt.NDArray[np.bool_]:
        """``splits_backward`` as [stages, micro-batches]."""
        found = np.zeros((self.placement.stages, self.microbatches), dtype=bool)
        for kinds, stages, microbatches in self.columns:
            found[stages[kinds == W], microbatches[kinds == W]] = True
        return found

    @cached_property
    def columns(self) -> tuple[Columns, ...]:
        """``ranks`` as arrays."""
        return tuple(columns(rank) for rank in self.ranks)

    @cached_property
    def is_lowered(self) -> bool:
        """True if transfers and reductions are named."""
        return any(bool((each.kinds > W).any()) for each in self.columns)

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                yield rank, action


def transfers_in(placement: Placement, action: Action) -> Action | None:
    """The RECV that a computation waits for; None where it needs no transfer: at the ends, and between two
    stages on one rank."""
    if action.kind is Kind.F and action.stage > 0:
        other, kind = action.stage - 1, Kind.RECV_F
    elif action.kind is Kind.B and action.stage < placement.stages - 1:
        other, kind = action.stage + 1, Kind.RECV_B
    else:
        return None
    if placement.rank(other) == placement.rank(action.stage):
        return None
    return Action(kind, action.stage, action.microbatch)


def transfer_out(placement: Placement, action: Action) -> Action | None:
    """The SEND of a computation's result; None where there is no transfer."""
    if action.kind is Kind.F and action.stage < placement.stages - 1:
        other, kind = action.stage + 1, Kind.SEND_F
    elif action.kind is Kind.B and action.stage > 0:
        other, kind = action.stage - 1, Kind.SEND_B
    else:
        return None
    if placement.rank(other) == placement.rank(action.stage):
        return None
    return Action(kind, action.stage, action.microbatch)


def matching_send(receive: Action) -> Action:
    """The SEND of the neighbouring stage that a RECV takes in."""
    if receive.kind is Kind.RECV_F:
        return Action(Kind.SEND_F, receive.stage - 1, receive.microbatch)
    if receive.kind is Kind.RECV_B:
        return Action(Kind.SEND_B, receive.stage + 1, receive.microbatch)
    raise ValueError(f"found {receive}; expected a RECV_F or RECV_B")


def matching_receive(send: Action) -> Action:
    """The RECV of the neighbouring stage that takes in a SEND."""
    if send.kind is Kind.SEND_F:
        return Action(Kind.RECV_F, send.stage + 1, send.microbatch)
    if send.kind is Kind.SEND_B:
        return Action(Kind.RECV_B, send.stage - 1, send.microbatch)
    raise ValueError(f"found {send}; expected a SEND_F or SEND_B")


def computations(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """The F, B and W of each rank alone."""
    return tuple(tuple(a for a in rank if a.kind.computes) for rank in schedule.ranks)
