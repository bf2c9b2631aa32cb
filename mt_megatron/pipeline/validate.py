"""Checks of a schedule: whether every rank can run it to its end, within its memory, with the right result.

The rules: each F and B once, W where the backward is split; what a computation needs comes before it;
micro-batches keep their order within a stage, for F and B each and for what computes weight gradients (W,
and B where it is whole), so that sums of gradients keep their order; sends match receives, in order; no rank
waits for ever where a channel holds few messages; no rank keeps more activations than it may.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import ConfigError
from .actions import (
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    B,
    F,
    Kind,
    Schedule,
    computations,
    matching_receive,
    matching_send,
    transfer_out,
    transfers_in,
)
from .lowering import lowered
from .simulate.memory import activation_peaks
from .sound import is_sound

_MOST_NAMED = 6
"""Micro-batches that one sentence names."""


def validate(schedule: Schedule, *, depth: int = 1, cap: int | Sequence[int] | None = None) -> list[str]:
    """One sentence for each problem; an empty list for a schedule that can be run.

    ``depth``: messages that a channel between two ranks holds in one direction, from their SEND until their
    RECV has been posted; a rank whose SEND finds no room waits. A schedule without transfers is ``lowered``.
    ``cap``: activations (micro-batches of one chunk) that each rank may keep, one number or one per rank.
    """
    problems = [] if is_sound(schedule) else _problems(schedule)
    if not problems:
        problems += _standstill(schedule, depth)
    if not problems and cap is not None:
        problems += _memory(schedule, cap)
    return problems


def _problems(schedule: Schedule) -> list[str]:
    """What ``is_sound`` finds, in sentences."""
    problems = list(_shape(schedule))
    if problems:
        return problems
    problems += _counts(schedule)
    problems += _order(schedule)
    if schedule.is_lowered:
        problems += _transfers(schedule)
    return problems


def check(schedule: Schedule, *, depth: int = 1, cap: int | Sequence[int] | None = None) -> None:
    """Raise ConfigError with every problem of ``schedule``; arguments as in ``validate``."""
    if problems := validate(schedule, depth=depth, cap=cap):
        raise ConfigError(
            f"pipeline schedule {schedule.name} cannot be run; correct the schedule, or generate one:\n  "
            + "\n  ".join(problems)
        )


def _shape(schedule: Schedule) -> Iterator[str]:
    """Actions that name no stage, micro-batch or rank of the schedule."""
    placement = schedule.placement
    if len(schedule.ranks) != placement.ranks:
        yield f"found actions of {len(schedule.ranks)} ranks; the placement has {placement.ranks}"
        return
    for rank, action in schedule:
        if not 0 <= action.stage < placement.stages:
            yield f"rank {rank}: {action} names stage {action.stage} of {placement.stages} stages"
        elif placement.rank(action.stage) != rank:
            yield (
                f"rank {rank}: {action} belongs to rank {placement.rank(action.stage)}, "
                f"which holds stage {action.stage}"
            )
        elif action.kind is Kind.REDUCE:
            if action.microbatch != -1:
                yield f"rank {rank}: {action} names a micro-batch; a reduction belongs to a whole stage"
        elif not 0 <= action.microbatch < schedule.microbatches:
            yield (
                f"rank {rank}: {action} names micro-batch {action.microbatch} of "
                f"{schedule.microbatches} micro-batches"
            )
        if schedule.forward_only and action.kind not in (Kind.F, Kind.SEND_F, Kind.RECV_F):
            yield f"rank {rank}: {action} in a schedule that runs forward only"


def _named(microbatches: Sequence[int]) -> str:
    shown = ", ".join(str(each) for each in microbatches[:_MOST_NAMED])
    more = len(microbatches) - _MOST_NAMED
    return f"micro-batch{'es' * (len(microbatches) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")


def _counts(schedule: Schedule) -> Iterator[str]:
    """Computations that are missing, or there more than once."""
    found = Counter(action for _, action in schedule if action.kind.computes)
    kinds = (Kind.F,) if schedule.forward_only else (Kind.F, Kind.B)
    for stage in range(schedule.placement.stages):
        rank = schedule.placement.rank(stage)
        for kind in kinds:
            if lost := [m for m in range(schedule.microbatches) if not found[Action(kind, stage, m)]]:
                yield f"rank {rank}: {kind.value} of stage {stage} is missing for {_named(lost)}"
        for kind in (Kind.F, Kind.B, Kind.W):
            if double := [m for m in range(schedule.microbatches) if found[Action(kind, stage, m)] > 1]:
                yield f"rank {rank}: {kind.value} of stage {stage} comes more than once for {_named(double)}"


def _needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """Computations of the same rank that ``action`` waits for."""
    kind, stage, microbatch = action
    if kind is Kind.W:
        yield Action(Kind.B, stage, microbatch)
        return
    other = stage - 1 if kind is Kind.F else stage + 1
    if 0 <= other < schedule.placement.stages and transfers_in(schedule.placement, action) is None:
        yield Action(kind, other, microbatch)
    if kind is Kind.B:
        yield Action(Kind.F, stage, microbatch)


def _order(schedule: Schedule) -> Iterator[str]:
    """Computations before what they need, and micro-batches out of order within a stage."""
    split = schedule.splits_backward
    for rank, actions in enumerate(computations(schedule)):
        everything = set(actions)
        before: set[Action] = set()
        latest: dict[tuple[Kind, int], int] = {}
        gradients: dict[int, Action] = {}
        """By stage, the computation of weight gradients so far whose micro-batch is the latest."""
        for action in actions:
            for need in _needs(schedule, action):
                if need in everything and need not in before:
                    yield f"rank {rank}: {action} comes before {need}, which it needs"
            last = latest.get((action.kind, action.stage), -1)
            if action.microbatch < last:
                yield (
                    f"rank {rank}: {action} comes after {action._replace(microbatch=last)}; micro-batches of "
                    "one stage keep their order"
                )
            latest[action.kind, action.stage] = max(last, action.microbatch)
            if action.kind is Kind.W or (action.kind is Kind.B and action[1:] not in split):
                added = gradients.setdefault(action.stage, action)
                if action.kind is not added.kind and action.microbatch < added.microbatch:
                    yield (
                        f"rank {rank}: {action} comes after {added}; the weight gradients of a stage are "
                        "added in the order of the micro-batches, so a whole backward has to wait for each W "
                        "of an earlier micro-batch"
                    )
                gradients[action.stage] = max(added, action, key=lambda each: each.microbatch)
            before.add(action)
        for action in actions:
            if action.kind is Kind.W and action._replace(kind=Kind.B) not in everything:
                yield f"rank {rank}: {action} has no {action._replace(kind=Kind.B)}"


def _transfers(schedule: Schedule) -> Iterator[str]:
    """Transfers that are missing, too many, or at the wrong place; receives in another order than sends."""
    placement = schedule.placement
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        found, done = Counter(actions), set[Action]()
        wanted: set[Action] = set()
        for action in actions:
            if not action.kind.computes:
                continue
            receive, send = transfers_in(placement, action), transfer_out(placement, action)
            if send is not None and schedule.forward_only and send.kind is Kind.SEND_B:
                send = None
            for transfer in (receive, send):
                if transfer is not None:
                    wanted.add(transfer)
                    if not found[transfer]:
                        yield f"rank {rank}: {transfer} is missing, which {action} needs"
        for action in actions:
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                made = action._replace(kind=Kind.F if action.kind is Kind.SEND_F else Kind.B)
                if action in wanted and made not in done:
                    yield f"rank {rank}: {action} comes before {made}, whose result it sends"
                to = placement.rank(matching_receive(action).stage) if action in wanted else rank
                sends[rank, to].append(action)
            elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                taker = action._replace(kind=Kind.F if action.kind is Kind.RECV_F else Kind.B)
                if action in wanted and taker in done:
                    yield f"rank {rank}: {action} comes after {taker}, which needs it"
                origin = placement.rank(matching_send(action).stage) if action in wanted else rank
                receives[origin, rank].append(action)
            if not action.kind.computes and action.kind is not Kind.REDUCE:
                if action not in wanted:
                    yield f"rank {rank}: {action} belongs to no computation that needs a transfer"
                elif found[action] > 1 and action in done:
                    yield f"rank {rank}: {action} is there more than once"
            done.add(action)
        yield from _reductions(schedule, rank)
    for edge in sorted(set(sends) | set(receives)):
        sent = [matching_receive(send) for send in sends[edge]] if edge[0] != edge[1] else receives[edge]
        for number, (one, other) in enumerate(zip(sent, receives[edge], strict=False)):
            if one != other:
                yield (
                    f"rank {edge[1]}: receive {number} from rank {edge[0]} is {other}, and rank {edge[0]} "
                    f"sends {matching_send(one)} there; receives keep the order of the sends"
                )
                break


def _reductions(schedule: Schedule, rank: int) -> Iterator[str]:
    actions = schedule.ranks[rank]
    reductions = [(index, action) for index, action in enumerate(actions) if action.kind is Kind.REDUCE]
    if not reductions:
        return
    counts = Counter(action.stage for _, action in reductions)
    last = {a.stage: index for index, a in enumerate(actions) if a.kind in (Kind.B, Kind.W)}
    for stage in schedule.placement.stages_of(rank):
        if counts[stage] != 1:
            yield f"rank {rank}: REDUCE of stage {stage} is there {counts[stage]} times; expected once"
    for index, action in reductions:
        if last.get(action.stage, -1) > index:
            yield f"rank {rank}: {action} comes before {actions[last[action.stage]]}, which it needs"


_NOTHING, _TAKE, _POST, _SEND = range(4)
"""What an action does with a channel: nothing; wait for a message; make room for one; send one."""


def _channel_uses(schedule: Schedule) -> list[list[tuple[int, int, int]]]:
    """Of each rank's actions: what it does, with which directed edge, and for ``_TAKE`` how many messages
    come before its own there. Transfers match, so messages come in the order in which they are received."""
    placement, batches = schedule.placement, schedule.microbatches
    of_stage = np.array([placement.rank(stage) for stage in range(-1, placement.stages + 1)])
    made = []
    for rank, found in enumerate(schedule.columns):
        kinds, stages, microbatches = (each.astype(np.int64) for each in found)
        back = (kinds == B) | (kinds == SEND_B) | (kinds == RECV_B)
        sends, posts = (kinds == SEND_F) | (kinds == SEND_B), (kinds == RECV_F) | (kinds == RECV_B)
        other = of_stage[1 + stages + np.where(back ^ sends, 1, -1)]
        takes = ((kinds == F) & (stages > 0)) | ((kinds == B) & (stages < placement.stages - 1))
        takes &= other != rank
        edge = np.where(sends, rank * placement.ranks + other, other * placement.ranks + rank)
        message = (back * placement.stages + stages) * batches + microbatches
        before = np.zeros(2 * placement.stages * batches, dtype=np.int64)
        for each in np.unique(edge[posts]):
            of_edge = message[posts & (edge == each)]
            before[of_edge] = np.arange(len(of_edge))
        uses = np.select([takes, posts, sends], [_TAKE, _POST, _SEND], _NOTHING)
        numbers = np.where(takes, before[message], 0)
        made.append(list(zip(uses.tolist(), edge.tolist(), numbers.tolist(), strict=True)))
    return made


def _standstill(schedule: Schedule, depth: int) -> Iterator[str]:
    """Ranks that wait for each other for ever, each with what it waits for. Transfers match."""
    if depth < 1:
        raise ConfigError(f"found channels of {depth} messages; expected at least 1")
    whole = schedule if schedule.is_lowered else lowered(schedule)
    placement = whole.placement
    at = [0] * placement.ranks
    sent, posted = ([0] * placement.ranks**2 for _ in range(2))
    everything = _channel_uses(whole)
    moved = True
    while moved:
        moved = False
        for rank, uses in enumerate(everything):
            place = at[rank]
            while place < len(uses):
                use, edge, number = uses[place]
                if use == _TAKE:
                    if sent[edge] <= number or posted[edge] <= number:
                        break
                elif use == _POST:
                    posted[edge] += 1
                elif use == _SEND:
                    if sent[edge] - posted[edge] >= depth:
                        break
                    sent[edge] += 1
                place += 1
                moved = True
            at[rank] = place
    for rank, actions in enumerate(whole.ranks):
        if at[rank] == len(actions):
            continue
        action = actions[at[rank]]
        if action.kind.computes:
            receive = transfers_in(placement, action)
            assert receive is not None
            send = matching_send(receive)
            yield f"rank {rank}: {action} waits for ever for {send} of rank {placement.rank(send.stage)}"
        else:
            other = placement.rank(matching_receive(action).stage)
            yield (
                f"rank {rank}: {action} waits for ever for room in the channel to rank {other}, which holds "
                f"{depth} message{'s' * (depth > 1)}"
            )


def _memory(schedule: Schedule, cap: int | Sequence[int]) -> Iterator[str]:
    caps = [cap] * schedule.placement.ranks if isinstance(cap, int) else list(cap)
    if len(caps) != schedule.placement.ranks:
        raise ConfigError(
            f"found caps of {len(caps)} ranks; expected one number, or {schedule.placement.ranks} of them"
        )
    for rank, (peak, most) in enumerate(zip(activation_peaks(schedule), caps, strict=True)):
        if peak > most:
            yield f"rank {rank}: keeps {peak} activations at once; the cap is {most}"
