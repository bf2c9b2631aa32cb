"""Memory that a schedule needs: it follows from the order of each rank's computations, not from times."""

from __future__ import annotations

import numpy as np

from ..actions import Kind, Schedule
from .costs import Costs, Floats, per_stage


def memory_peaks(schedule: Schedule, costs: Costs) -> Floats:
    """Bytes each rank holds at most, [ranks]: ``costs.static`` of its stages, and ``costs.activation`` of
    each micro-batch from its F to its B, or to its W (``costs.weight_share`` of them) where the backward is
    split. Forward-only schedules keep nothing."""
    stages, microbatches = schedule.placement.stages, schedule.microbatches
    kept = per_stage(costs.activation, stages, microbatches, "activation")
    static = per_stage(costs.static, stages, 1, "static")
    peaks = np.zeros(schedule.placement.ranks)
    split = schedule.splits_backward
    for rank, actions in enumerate(schedule.ranks):
        held = peak = 0.0
        for kind, stage, microbatch in actions if not schedule.forward_only else ():
            size = float(kept[stage, microbatch])
            if kind is Kind.F:
                held += size
                peak = max(peak, held)
            elif kind is Kind.W:
                held -= size * costs.weight_share
            elif kind is Kind.B:
                share = costs.weight_share if (stage, microbatch) in split else 0.0
                held -= size * (1.0 - share)
        peaks[rank] = peak + sum(float(static[stage, 0]) for stage in schedule.placement.stages_of(rank))
    return peaks


def activation_peaks(schedule: Schedule) -> tuple[int, ...]:
    """Activations that each rank holds at most: micro-batches of one chunk, from F to B, or to W where the
    backward is split."""
    return tuple(round(peak) for peak in memory_peaks(schedule, Costs()).tolist())
