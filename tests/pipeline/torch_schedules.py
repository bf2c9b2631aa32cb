"""Orders of ``torch.distributed.pipelining``'s schedules, an oracle for the generators.

Its classes want process groups and stage modules; the methods that compute the order of a rank want sizes
alone, so they are called on objects that have only those.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import schedules

from mt_megatron.pipeline.actions import Action, Kind

CLASSES = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "breadth_first": schedules.ScheduleLoopedBFS,
    "zb_h1": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


def order(name: str, ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Actions of each rank; those that run in one step of torch's are taken apart, idle steps left out."""
    if name == "1f1b":
        return _plain(ranks, microbatches)
    made = []
    for rank in range(ranks):
        schedule: Any = object.__new__(CLASSES[name])
        schedule.pp_group_size, schedule.rank, schedule._n_microbatches = ranks, rank, microbatches
        schedule._stages = [None] * chunks
        schedule.n_local_stages, schedule.num_stages = chunks, ranks * chunks
        schedule.number_of_rounds = max(1, microbatches // ranks)
        schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
        made.append(_flat(schedule._calculate_single_rank_operations(rank)))
    return made


def _flat(actions: list[Any]) -> list[Action]:
    kinds = {"F": Kind.F, "B": Kind.B, "I": Kind.B, "W": Kind.W}
    made = []
    for action in actions:
        for each in () if action is None else action.sub_actions or (action,):
            kind = each.computation_type.value
            if kind in kinds:  # Not REDUCE_GRAD.
                made.append(Action(kinds[kind], each.stage_index, each.microbatch_index))
    return made


def _plain(ranks: int, microbatches: int) -> list[list[Action]]:
    schedule: Any = object.__new__(schedules.Schedule1F1B)
    schedule._num_stages, schedule._n_microbatches = ranks, microbatches
    made = [_flat(actions) for _, actions in sorted(schedule._get_pipeline_order().items())]
    # torch 2.13 counts the last rank's forwards from 1 there; what that rank runs begins at 0.
    forwards = [action for action in made[-1] if action.kind is Kind.F]
    shift = forwards[0].microbatch
    assert [action.microbatch - shift for action in forwards] == list(range(microbatches))
    made[-1] = [
        action._replace(microbatch=action.microbatch - shift) if action.kind is Kind.F else action
        for action in made[-1]
    ]
    return made
