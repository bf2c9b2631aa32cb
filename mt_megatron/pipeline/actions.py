"""The intermediate representation of a pipeline schedule: ordered actions per rank, and where stages lie.

A schedule names computations (F, B, W) and, once ``lowered``, transfers (SEND, RECV) and gradient
reductions (REDUCE). It knows nothing of tensors, times or processes: a generator makes it, the validator
checks it, the simulator times it, the executor runs it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Kind(str, Enum):
    """Kind of an action."""

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

    @property
    def computes(self) -> bool:
        return self in (Kind.F, Kind.B, Kind.W)


class Action(NamedTuple):
    """One action of one rank. ``microbatch`` is -1 for REDUCE, which belongs to a whole stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.microbatch < 0 else self.microbatch}"


Call = Action | tuple[Action, ...]
"""An action, or SENDs and RECVs that a rank waits for until they are over, beginning those that have not
begun yet: a blocking exchange."""


class Style(str, Enum):
    """How stages are laid over ranks."""

    LOOP = "loop"
    """Stage s lies on rank s mod P as its chunk s div P (Megatron-Core's placement)."""
    V = "v"
    """Two chunks: stages 0 to P-1 on ranks 0 to P-1, stages P to 2P-1 back from rank P-1 to 0."""


@dataclass(frozen=True)
class Placement:
    """Where each of ``stages`` = ranks x chunks stages lies. Ranks count within one pipeline."""

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
        return frozenset((a.stage, a.microbatch) for rank in self.ranks for a in rank if a.kind is Kind.W)

    @cached_property
    def is_lowered(self) -> bool:
        """True if transfers and reductions are named."""
        return any(not action.kind.computes for rank in self.ranks for action in rank)

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


def lowered(schedule: Schedule, *, ahead: int = 1, reduce_early: bool = True) -> Schedule:
    """``schedule`` with transfers and reductions: a SEND right after the computation whose result it
    sends, a RECV at least ``ahead`` computations before the one that waits for it, and a REDUCE after the
    last computation of weight gradients of a stage (at the end of the rank's list if not ``reduce_early``).

    A RECV comes before the computation during which its message is sent where every F takes one unit and
    every B two, so that no SEND has to wait for room and the ranks cannot wait for each other, however long
    computations really take. RECVs of one directed edge follow the order of its SENDs: channels need no
    tags. Transfers and reductions that are there already are made anew."""
    begins, ends = _nominal_times(schedule)
    ranks: list[tuple[Action, ...]] = []
    for rank, actions in enumerate(computations(schedule)):
        receives = _receives(schedule, rank, actions, ahead, begins[rank], ends)
        last = _last_gradients(actions)
        out: list[Action] = []
        for index, action in enumerate(actions):
            out += receives.get(index, ())
            out.append(action)
            if (send := transfer_out(schedule.placement, action)) is not None and not (
                schedule.forward_only and send.kind is Kind.SEND_B
            ):
                out.append(send)
            if reduce_early and last.get(action.stage) == index:
                out.append(Action(Kind.REDUCE, action.stage, -1))
        if not reduce_early:
            out.extend(
                Action(Kind.REDUCE, stage, -1)
                for stage in schedule.placement.stages_of(rank)
                if stage in last
            )
        ranks.append(tuple(out))
    return Schedule(
        schedule.name, schedule.placement, schedule.microbatches, tuple(ranks), schedule.forward_only
    )


def _receives(
    schedule: Schedule,
    rank: int,
    actions: Sequence[Action],
    ahead: int,
    begins: Sequence[int],
    ends: Mapping[Action, int],
) -> dict[int, list[Action]]:
    """RECVs of ``rank`` before each of its computations, by index."""
    needed: dict[Action, int] = {}
    for index, action in enumerate(actions):
        if (receive := transfers_in(schedule.placement, action)) is not None:
            needed[matching_send(receive)] = index
    due: list[tuple[int, int, int, int, Action]] = []
    for sender in {schedule.placement.rank(send.stage) for send in needed}:
        soonest = latest = len(actions)
        computed = [action for action in schedule.ranks[sender] if action.kind.computes]
        for number, action in reversed(list(enumerate(computed))):
            send = transfer_out(schedule.placement, action)
            if send is None or send not in needed:
                continue
            soonest = min(soonest, needed[send])
            latest = min(latest, max(0, soonest - ahead))
            if action in ends:
                latest = min(latest, max(0, bisect_right(begins, ends[action]) - 1))
            due.append((latest, soonest, sender, number, send))
    found: dict[int, list[Action]] = {}
    for latest, _, _, _, send in sorted(due):
        found.setdefault(latest, []).append(matching_receive(send))
    return found


def _nominal_times(schedule: Schedule) -> tuple[list[list[int]], dict[Action, int]]:
    """Begins of each rank's computations and end of each computation, with 1 for F and W, 2 for a whole B and
    1 for one whose weight gradients a W computes, and transfers that take no time. Computations that wait
    for each other for ever are left out."""
    ranks, split = computations(schedule), schedule.splits_backward
    begins: list[list[int]] = [[] for _ in ranks]
    ends: dict[Action, int] = {}
    free = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            for action in actions[len(begins[rank]) :]:
                begin = free[rank]
                if (receive := transfers_in(schedule.placement, action)) is not None:
                    kind = Kind.F if receive.kind is Kind.RECV_F else Kind.B
                    sent = Action(kind, matching_send(receive).stage, action.microbatch)
                    if sent not in ends:
                        break
                    begin = max(begin, ends[sent])
                whole = action.kind is Kind.B and action[1:] not in split
                free[rank] = ends[action] = begin + (2 if whole else 1)
                begins[rank].append(begin)
                moved = True
    return begins, ends


def _last_gradients(actions: Sequence[Action]) -> dict[int, int]:
    """Index of the last B or W of each stage."""
    return {a.stage: index for index, a in enumerate(actions) if a.kind in (Kind.B, Kind.W)}
