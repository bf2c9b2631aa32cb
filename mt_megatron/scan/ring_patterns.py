"""Which hop of a ring is slow: each hop leaves its own pattern in the members' times of exit.

In a ring every member passes a piece on to the next one, round by round. Behind a slow hop the member
that receives is last, and the others follow the less, the farther they are away; where messages
overtake nothing but travel late, the pattern has steps instead. Both are computed from the rounds,
starting at each member's own time of arrival, and compared with what was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .exchanges import Label, Samples
from .robust import Floats, spread

CLEARLY_BETTER = 0.5
"""The best candidate's remaining error (squared) in units of the second best's, at most."""

EXPLAINED = 0.6
"""The least share of the pattern's variance that the best candidate explains."""

_MOST_SAMPLES = 40
_MOST_CANDIDATES = 10
_SCALES = (0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 1.9, 2.4)

Hops = tuple[int, ...]
"""Positions of the senders of the slow hops in the ring."""


@dataclass(frozen=True, kw_only=True)
class RingFit:
    """The candidate that fits best."""

    hops: Hops
    accepted: bool
    explained: float
    against_second: float
    """Remaining squared error over the second best's."""


def rounds(op: str, members: int) -> int:
    """Rounds of a ring of ``members`` for the operation."""
    all_reduce = "all_reduce" in op or op in ("start_grad_sync", "finish_grad_sync") or "grads" in op
    return 2 * (members - 1) if all_reduce else members - 1


def ring_exits(arrival: Floats, hop: float, extra: Floats, number: int, *, queueing: bool) -> Floats:
    """Times of exit [samples, members] of a ring of ``number`` rounds.

    ``arrival`` [samples, members]; ``hop``: ns of a healthy hop; ``extra`` [members]: what the hop *to* each
    member takes more. ``queueing``: a slow hop is busy all that time (too little bandwidth), else
    messages only travel longer and do not wait for each other.
    """
    at = arrival.copy()
    if queueing:
        cost = hop + extra
        for _ in range(number):
            at = np.maximum(at, np.roll(at, 1, axis=1)) + cost
        return at
    for _ in range(number):
        at = np.maximum(at + hop, np.roll(at, 1, axis=1) + hop + extra)
    return at


def fit_ring(
    samples: Samples, labels: Sequence[Label], healthy_ns: float, more: Sequence[Hops] = ()
) -> RingFit | None:
    """Fit every single hop, and the sets of hops ``more``, to the members' exits.

    ``healthy_ns``: what the operation takes when nothing is slow. None where there is nothing to fit:
    too few samples, members that did not wait, or exits that do not differ.
    """
    usable = np.isfinite(samples.exit).all(axis=1)
    at = np.flatnonzero(usable)
    if len(at) < 6 or samples.exit.shape[1] < 3:
        return None
    at = at[np.linspace(0, len(at) - 1, min(len(at), _MOST_SAMPLES)).astype(np.int64)]
    arrival = samples.arrival[at].astype(np.float64)
    seen = samples.exit[at].astype(np.float64)
    members = seen.shape[1]
    number = rounds(labels[int(samples.label[at[0]])][0], members)
    hop = healthy_ns / number
    lost = float(np.median(seen.max(axis=1))) - healthy_ns
    if lost <= 0:
        return None
    healthy = ring_exits(arrival, hop, np.zeros(members), number, queueing=True)
    pattern = _centred(np.median(seen - healthy, axis=0))
    size = float((pattern**2).sum())
    error = np.array([spread((seen - healthy)[:, each]) for each in range(members)]) / np.sqrt(len(at))
    if size < 9.0 * float((error**2).sum()):
        return None
    scores: dict[Hops, float] = {}
    for hops in [*_candidates(pattern), *more]:
        scores[hops] = min(
            _error(arrival, seen, hop, _extra(members, hops, scale * lost / share), number, queueing)
            for queueing, share in ((True, float(number)), (False, float(-(-number // members))))
            for scale in _SCALES
        )
    order = sorted(scores, key=lambda hops: scores[hops])
    best = order[0]
    second = scores[order[1]] if len(order) > 1 else size
    explained = 1.0 - scores[best] / size
    against = scores[best] / max(second, 1e-9)
    return RingFit(
        hops=best,
        accepted=explained >= EXPLAINED and against <= CLEARLY_BETTER,
        explained=explained,
        against_second=against,
    )


def fit_pairs(samples: Samples, healthy_ns: float) -> tuple[int, int] | None:
    """The pair of members that alone leave an all-to-all late; None if no two stand out."""
    usable = np.isfinite(samples.exit).all(axis=1)
    if usable.sum() < 6 or samples.exit.shape[1] < 3:
        return None
    late = np.median(samples.exit[usable], axis=0).astype(np.float64)
    order = np.argsort(late)
    if len(late) == 3:
        gap_in, gap_out = late[order[1]] - late[order[0]], abs(late[order[2]] - late[order[1]])
    else:
        gap_in = late[order[-2]] - late[order[-3]]
        gap_out = max(late[order[-1]] - late[order[-2]], late[order[-3]] - late[order[0]])
    if gap_in < 0.3 * healthy_ns or gap_in < 2.0 * gap_out:
        return None
    return int(min(order[-1], order[-2])), int(max(order[-1], order[-2]))


def _candidates(pattern: Floats) -> list[Hops]:
    """Single hops, those first whose receiver leaves later than its sender; all of them in small rings."""
    steps = pattern - np.roll(pattern, 1)
    order = np.argsort(-steps)[:_MOST_CANDIDATES]
    members = len(pattern)
    return [(int((receiver - 1) % members),) for receiver in order]


def _extra(members: int, hops: Hops, extra: float) -> Floats:
    found = np.zeros(members)
    for sender in hops:
        found[(sender + 1) % members] = extra
    return found


def _error(arrival: Floats, seen: Floats, hop: float, extra: Floats, number: int, queueing: bool) -> float:
    predicted = ring_exits(arrival, hop, extra, number, queueing=queueing)
    rest = _centred(np.median(seen - predicted, axis=0))
    return float((rest**2).sum())


def _centred(pattern: Floats) -> Floats:
    centred: Floats = pattern - pattern.mean()
    return centred
