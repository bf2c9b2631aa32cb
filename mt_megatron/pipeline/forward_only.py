"""The schedule of an evaluation: forward passes alone."""

from __future__ import annotations

from .actions import Action, Kind, Placement, Schedule, Style
from .generate.looping import forward_order


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Groups of as many micro-batches as ranks go through one chunk after the other, as in Megatron-Core's
    interleaved schedule; in a V all micro-batches go through the first chunk before the second."""
    group = microbatches if placement.style is Style.V else min(placement.ranks, microbatches)
    order = list(forward_order(placement.chunks, microbatches, max(group, 1)))
    ranks = tuple(
        tuple(Action(Kind.F, placement.stage(rank, chunk), microbatch) for chunk, microbatch in order)
        for rank in range(placement.ranks)
    )
    return Schedule("forward_only", placement, microbatches, ranks, forward_only=True)
