"""Random schedules of every generator, and changes to schedules that break a rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from mt_megatron.pipeline.actions import Action, Kind, Schedule
from mt_megatron.pipeline.generate.catalogue import NAMES, generate
from mt_megatron.pipeline.lowering import lowered
from mt_megatron.pipeline.simulate.costs import Costs, Link


def drawn(rng: random.Random, *, ranks: int, microbatches: int) -> tuple[Schedule, list[int] | None]:
    """A schedule of at most ``ranks`` ranks and ``microbatches`` micro-batches, and the caps it must keep."""
    name = rng.choice(list(NAMES))
    pipeline, count = rng.randint(1, ranks), rng.randint(1, microbatches)
    chunks, group = rng.randint(1, 4), None
    if name == "1f1b":
        chunks = 1
    elif name in ("zbv", "dualpipev"):
        chunks, count = 2, max(count, 2 * pipeline if name == "dualpipev" else 1)
    elif name == "interleaved":
        chunks, count = max(2, chunks), pipeline * rng.randint(1, max(1, microbatches // pipeline))
    if name == "hybrid" or (name in ("depth_first", "zb_h1") and rng.random() < 0.5):
        group = rng.randint(1, count)
    if name != "memory_capped":
        made = generate(name, ranks=pipeline, chunks=chunks, microbatches=count, group=group)
        return made, None
    caps = [rng.randint(chunks, chunks * min(count, pipeline + 3) + 2) for _ in range(pipeline)]
    link = Link(rng.choice([0.0, 0.3, 2.0]), rng.choice([0.5, 4.0, float("inf")]), rng.choice([None, 1, 2]))
    costs = Costs(
        forward=[rng.uniform(0.5, 1.5) for _ in range(pipeline * chunks)],
        backward=2.0,
        weight=rng.uniform(0.1, 1.9),
        message=1.0,
        links={(0, 1 % pipeline): link},
    )
    made = generate(
        name,
        ranks=pipeline,
        chunks=chunks,
        microbatches=count,
        cap=caps,
        split=rng.random() < 0.5,
        costs=costs,
    )
    return made, caps


def _with(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(actions)
    return replace(schedule, ranks=tuple(ranks))


def _some(rng: random.Random, schedule: Schedule, *kinds: Kind) -> tuple[int, int, Action] | None:
    """Rank, index and action of one action of ``kinds``."""
    found = [
        (rank, index, action)
        for rank, actions in enumerate(schedule.ranks)
        for index, action in enumerate(actions)
        if action.kind in kinds
    ]
    return rng.choice(found) if found else None


TRANSFERS = (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)


def dropped(rng: random.Random, schedule: Schedule) -> Schedule | None:
    if (found := _some(rng, schedule, Kind.F, Kind.B, *TRANSFERS)) is None:
        return None
    rank, index, _ = found
    return _with(schedule, rank, [*schedule.ranks[rank][:index], *schedule.ranks[rank][index + 1 :]])


def doubled(rng: random.Random, schedule: Schedule) -> Schedule | None:
    if (found := _some(rng, schedule, *Kind)) is None:
        return None
    rank, index, action = found
    actions = list(schedule.ranks[rank])
    actions.insert(rng.randint(index, len(actions)), action)
    return _with(schedule, rank, actions)


def microbatches_swapped(rng: random.Random, schedule: Schedule) -> Schedule | None:
    if (found := _some(rng, schedule, Kind.F, Kind.B, Kind.W)) is None:
        return None
    rank, _, action = found
    actions = list(schedule.ranks[rank])
    same = [i for i, each in enumerate(actions) if each[:2] == action[:2]]
    if len(same) < 2:
        return None
    one, other = rng.sample(same, 2)
    actions[one], actions[other] = actions[other], actions[one]
    return _with(schedule, rank, actions)


def on_another_rank(rng: random.Random, schedule: Schedule) -> Schedule | None:
    found = _some(rng, schedule, *Kind)
    if found is None or len(schedule.ranks) < 2:
        return None
    rank, index, action = found
    other = rng.choice([each for each in range(len(schedule.ranks)) if each != rank])
    made = _with(schedule, rank, [*schedule.ranks[rank][:index], *schedule.ranks[rank][index + 1 :]])
    actions = list(made.ranks[other])
    actions.insert(rng.randint(0, len(actions)), action)
    return _with(made, other, actions)


def out_of_range(rng: random.Random, schedule: Schedule) -> Schedule | None:
    if (found := _some(rng, schedule, Kind.F, Kind.B)) is None:
        return None
    rank, index, action = found
    actions = list(schedule.ranks[rank])
    actions[index] = rng.choice(
        [
            action._replace(stage=schedule.placement.stages),
            action._replace(stage=-1),
            action._replace(microbatch=schedule.microbatches),
            action._replace(microbatch=-1),
        ]
    )
    return _with(schedule, rank, actions)


def before_what_it_needs(rng: random.Random, schedule: Schedule) -> Schedule | None:
    """A B before its F, a W before its B, a SEND before its computation, a REDUCE at the beginning."""
    if (found := _some(rng, schedule, Kind.B, Kind.W, Kind.SEND_F, Kind.SEND_B, Kind.REDUCE)) is None:
        return None
    rank, index, action = found
    needs = {Kind.B: Kind.F, Kind.W: Kind.B, Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}
    actions = list(schedule.ranks[rank])
    del actions[index]
    at = 0 if action.kind is Kind.REDUCE else actions.index(action._replace(kind=needs[action.kind]))
    actions.insert(at, action)
    return _with(schedule, rank, actions)


def received_too_late(rng: random.Random, schedule: Schedule) -> Schedule | None:
    if (found := _some(rng, schedule, Kind.RECV_F, Kind.RECV_B)) is None:
        return None
    rank, index, action = found
    actions = list(schedule.ranks[rank])
    del actions[index]
    taker = action._replace(kind=Kind.F if action.kind is Kind.RECV_F else Kind.B)
    actions.insert(actions.index(taker) + 1, action)
    return _with(schedule, rank, actions)


def received_out_of_order(rng: random.Random, schedule: Schedule) -> Schedule | None:
    if (found := _some(rng, schedule, Kind.RECV_F, Kind.RECV_B)) is None:
        return None
    rank, index, action = found
    actions = list(schedule.ranks[rank])
    # The same kind and stage: the same edge.
    same = [i for i, each in enumerate(actions) if each[:2] == action[:2] and i != index]
    if not same:
        return None
    other = rng.choice(same)
    actions[index], actions[other] = actions[other], actions[index]
    return _with(schedule, rank, actions)


def weight_gradients_out_of_order(rng: random.Random, schedule: Schedule) -> Schedule | None:
    """A backward that is whole although weight gradients of earlier micro-batches are still put off."""
    found = []
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            if action.kind is Kind.W:
                later = actions[actions.index(action._replace(kind=Kind.B)) :]
                if any(each[:2] == action[:2] and each.microbatch < action.microbatch for each in later):
                    found.append((rank, index))
    if not found:
        return None
    rank, index = rng.choice(found)
    actions = schedule.ranks[rank]
    return _with(schedule, rank, [*actions[:index], *actions[index + 1 :]])


def waiting_for_each_other(rng: random.Random, schedule: Schedule) -> Schedule | None:
    """A forward after the backward before it, which the next rank runs after that forward."""
    placement = schedule.placement
    stages = [s for s in range(placement.stages - 1) if placement.rank(s) != placement.rank(s + 1)]
    if not stages or schedule.microbatches < 2 or schedule.is_lowered:
        return None
    stage, batch = rng.choice(stages), rng.randrange(1, schedule.microbatches)
    made = schedule
    for each, first, second in (
        (stage, Action(Kind.B, stage, batch - 1), Action(Kind.F, stage, batch)),
        (stage + 1, Action(Kind.F, stage + 1, batch), Action(Kind.B, stage + 1, batch - 1)),
    ):
        rank = placement.rank(each)
        actions = list(made.ranks[rank])
        if actions.index(second) < actions.index(first):
            actions.remove(second)
            actions.insert(actions.index(first) + 1, second)
        made = _with(made, rank, actions)
    return made


BREAKING: list[Callable[[random.Random, Schedule], Schedule | None]] = [
    dropped,
    doubled,
    microbatches_swapped,
    on_another_rank,
    out_of_range,
    before_what_it_needs,
    received_too_late,
    received_out_of_order,
    weight_gradients_out_of_order,
    waiting_for_each_other,
]
"""Each changes a valid schedule so that it breaks a rule, or returns None where it cannot."""


def broken(rng: random.Random, *, ranks: int, microbatches: int) -> tuple[str, Schedule]:
    """The name of a change and a schedule that it has broken."""
    while True:
        schedule, _ = drawn(rng, ranks=ranks, microbatches=microbatches)
        if rng.random() < 0.5:
            schedule = lowered(schedule)
        change = rng.choice(BREAKING)
        if (made := change(rng, schedule)) is not None:
            return change.__name__, made
