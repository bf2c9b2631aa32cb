"""Schedules over Megatron-Core's placement whose order follows from counting.

Micro-batches run in groups: a group goes through chunk after chunk, then the next group follows. A rank
runs some forwards ahead, then one forward and one backward in turn, then the backwards that are left.
Interleaved 1F1B: arXiv 2104.04473, section 2.2; breadth-first: arXiv 2211.05953.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..actions import Action, Kind, Placement, Schedule

Pass = tuple[int, int]
"""Chunk and micro-batch."""


def forward_order(chunks: int, microbatches: int, group: int) -> Iterator[Pass]:
    """Forward passes of every rank. Backwards take the same order with the chunks reversed. The last group
    is smaller where ``group`` does not divide the micro-batches."""
    for begin in range(0, microbatches, group):
        for chunk in range(chunks):
            for microbatch in range(begin, min(begin + group, microbatches)):
                yield chunk, microbatch


def one_forward_one_backward(
    name: str, placement: Placement, microbatches: int, group: int, ahead: Callable[[int], int]
) -> Schedule:
    """Groups of ``group`` micro-batches; rank r runs ``ahead(r)`` forwards before the first pair."""
    order = list(forward_order(placement.chunks, microbatches, group))
    ranks = []
    for rank in range(placement.ranks):
        first = min(ahead(rank), len(order))
        stages = placement.stages_of(rank)
        forwards = [Action(Kind.F, stages[chunk], microbatch) for chunk, microbatch in order]
        backwards = [Action(Kind.B, stages[-1 - chunk], microbatch) for chunk, microbatch in order]
        actions = forwards[:first]
        for index, backward in enumerate(backwards):
            actions += [*forwards[first + index : first + index + 1], backward]
        ranks.append(tuple(actions))
    return Schedule(name, placement, microbatches, tuple(ranks))


def plain(placement: Placement, microbatches: int) -> Schedule:
    """1F1B. One chunk."""
    return one_forward_one_backward(
        "1f1b", placement, microbatches, microbatches, lambda rank: plain_ahead(placement, rank)
    )


def plain_ahead(placement: Placement, rank: int) -> int:
    """Forwards that a rank runs ahead under 1F1B: one for each rank that follows."""
    return placement.ranks - 1 - rank


def interleaved(placement: Placement, microbatches: int, group: int | None) -> Schedule:
    """Megatron-Core's interleaved order. ``group``: None for as many micro-batches as ranks, as there."""
    return one_forward_one_backward(
        "interleaved",
        placement,
        microbatches,
        group or placement.ranks,
        lambda rank: interleaved_ahead(placement, microbatches, rank, group),
    )


def interleaved_ahead(placement: Placement, microbatches: int, rank: int, group: int | None = None) -> int:
    """Forwards that a rank runs ahead under Megatron-Core's interleaved schedule: two more for each rank
    that follows, so that a message has the time of a pass to arrive; all of them where there are as many
    micro-batches as ranks and no ``group`` is given."""
    if group is None and microbatches == placement.ranks:
        return placement.chunks * microbatches
    return 2 * (placement.ranks - 1 - rank) + (placement.chunks - 1) * (group or placement.ranks)


def depth_first(placement: Placement, microbatches: int, group: int, name: str) -> Schedule:
    """A group goes through all chunks before the next begins, with the fewest forwards ahead that need no
    waiting once the pipeline is full: rank 0 holds ``(chunks - 1) * group + ranks`` activations. Groups
    smaller than the ranks hold fewer and wait."""
    last, chunks = placement.ranks - 1, placement.chunks
    # A rank that is further ahead of the last one than a group would wait for a forward that the last one
    # runs after backwards which wait for this rank.
    most = group if chunks > 1 else last
    return one_forward_one_backward(
        name, placement, microbatches, group, lambda rank: min(last - rank, most) + (chunks - 1) * group
    )


def breadth_first(placement: Placement, microbatches: int) -> Schedule:
    """All micro-batches through one chunk before the next chunk; backwards begin after all forwards, and
    finish the last chunk first. GPipe where there is one chunk."""
    chunks = placement.chunks
    return one_forward_one_backward(
        "breadth_first", placement, microbatches, microbatches, lambda rank: chunks * microbatches
    )
