"""ZB-H1 (arXiv 2401.10241, section 2.2): 1F1B with weight gradients split off, which fill the drain.

Rank r defers its weight gradients by r micro-batches, so each rank holds as many activations as rank 0 of
1F1B. With several chunks the same rule runs over the depth-first order.
"""

from __future__ import annotations

from collections import deque

from ..actions import Action, Kind, Placement, Schedule, computations
from .looping import depth_first


def zb_h1(placement: Placement, microbatches: int, group: int) -> Schedule:
    """Weight gradients run in the order of their backwards: from the ``rank``-th backward on one after each,
    the rest at the end."""
    made = depth_first(placement, microbatches, group, "zb_h1")
    ranks = []
    for rank, actions in enumerate(computations(made)):
        out: list[Action] = []
        deferred: deque[Action] = deque()
        for action in actions:
            out.append(action)
            if action.kind is Kind.B:
                deferred.append(Action(Kind.W, action.stage, action.microbatch))
                if len(deferred) > rank:
                    out.append(deferred.popleft())
        ranks.append((*out, *deferred))
    return Schedule("zb_h1", placement, microbatches, tuple(ranks))
