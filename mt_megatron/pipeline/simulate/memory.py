"""Memory that a schedule needs: it follows from the order of each rank's computations, not from times."""

from __future__ import annotations

import numpy as np

from ..actions import B, F, Kind, Schedule, W, computations
from .costs import Costs, Floats, per_stage


def memory_peaks(schedule: Schedule, costs: Costs) -> Floats:
    """Bytes each rank holds at most, [ranks]: ``costs.static`` of its stages, and ``costs.activation`` of
    each micro-batch from its F to its B, or to its W (``costs.weight_share`` of them) where the backward is
    split. Forward-only schedules keep nothing."""
    stages, microbatches = schedule.placement.stages, schedule.microbatches
    kept = per_stage(costs.activation, stages, microbatches, "activation")
    static = per_stage(costs.static, stages, 1, "static")
    peaks = np.zeros(schedule.placement.ranks)
    for rank, (kinds, of_stage, batches) in enumerate(schedule.columns):
        peak = 0.0
        if len(kinds) and not schedule.forward_only:
            size = kept[of_stage, batches]
            share = np.where(schedule.split_table[of_stage, batches], costs.weight_share, 0.0)
            # One rounding after another, as the actions come.
            held = np.cumsum(
                np.select(
                    [kinds == F, kinds == B, kinds == W],
                    [size, -(size * (1.0 - share)), -(size * costs.weight_share)],
                )
            )
            peak = float(held[kinds == F].max(initial=0.0))
        peaks[rank] = peak + sum(float(static[stage, 0]) for stage in schedule.placement.stages_of(rank))
    return peaks


def activation_peaks(schedule: Schedule) -> tuple[int, ...]:
    """Activations that each rank holds at most: micro-batches of one chunk, from F to B, or to W where the
    backward is split."""
    return tuple(round(peak) for peak in memory_peaks(schedule, Costs()).tolist())


def peaks_by_chunk(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each rank the activations that it keeps of each of its chunks, at every moment at which they may be
    most: after an F with no F behind it. For chunks whose activations differ in size."""
    found = []
    for rank, actions in enumerate(computations(schedule)):
        chunk_of = {stage: chunk for chunk, stage in enumerate(schedule.placement.stages_of(rank))}
        kept, moments = [0] * len(chunk_of), set()
        for action, following in zip(actions, (*actions[1:], None), strict=True):
            if action.kind is Kind.F:
                kept[chunk_of[action.stage]] += 1
                if following is None or following.kind is not Kind.F:
                    moments.add(tuple(kept))
            elif (action.kind is Kind.W) == ((action.stage, action.microbatch) in schedule.splits_backward):
                kept[chunk_of[action.stage]] -= 1
        found.append(tuple(sorted(moments)))
    return tuple(found)
