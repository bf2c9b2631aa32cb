"""Which hop of a ring is slow: each hop leaves its own pattern in the members' times of exit.

In a ring every member passes a piece on to the next one, round by round. Who is late behind a slow hop, and
by how much, depends on where the hop is and on how the network holds the sender up. The ways it
may do so (``WAYS``) are computed round by round, starting at each member's own time of arrival, and
compared with what was seen; the hop that fits best by any of them has to beat every other hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mt_megatron.scan.analysis.matched_ops import Label, Samples
from mt_megatron.scan.analysis.robust import Floats, spread

CLEARLY_BETTER = 0.5
"""The best candidate's remaining error (squared) in units of the second best's, at most."""

TOLERATED = 0.2
"""Of what the ring is known to lose, by how much a candidate may miss it: patterns alone may be alike."""

EXPLAINED = 0.85
"""The least share of the pattern's variance that the best candidate explains."""

_MOST_SAMPLES = 30
_MOST_TIMES = 240
_MOST_CANDIDATES = 8
_SCALES = (0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.9)
_INSIDE = (0.2, 1.0)
"""How long a hop within a node may take, in units of one between nodes, where a ring has both."""

_PARTS = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93)

Way = Literal["rendezvous", "posted", "sending", "busy", "eager", "late"]
WAYS: tuple[Way, ...] = ("rendezvous", "posted", "sending", "busy", "eager", "late")
"""``rendezvous``: a transfer begins when both are ready and ends for both at once. ``sending``: it begins
when the sender is ready and holds it until it is over; ``posted``: the same, but nothing is sent before the
receiver has come. ``busy``: the sender goes on, but the hop takes the next message only when it has
delivered the last. ``eager``: the sender never waits, the receiver takes its time for each message. ``late``:
messages overlap and only travel longer, and nothing is sent before the receiver has come."""

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

    amplitude: float
    """Between the first and the last exit beyond what arrivals explain, in units of the whole operation."""

    lost_ns: float
    """What the slow hop costs the whole operation."""


def rounds(op: str, members: int, *, sharded: bool = False) -> int:
    """Rounds of a ring of ``members`` for the operation. ``sharded``: parameters are gathered separately, so
    that gradients are only reduced and scattered."""
    gradients = op in ("start_grad_sync", "finish_grad_sync") or "grads" in op
    all_reduce = "all_reduce" in op or (gradients and not sharded)
    return 2 * (members - 1) if all_reduce else members - 1


def ring_exits(arrival: Floats, hop: Floats | float, extra: Floats, number: int, way: Way) -> Floats:
    """Times of exit [..., members] of a ring of ``number`` rounds.

    ``arrival`` [..., members]; ``hop``: ns of a healthy hop, or of that *to* each member; ``extra`` [...,
    members]: what the hop *to* each member takes more. Leading dimensions are broadcast.
    """
    at: Floats = arrival + 0.0 * (hop + extra)
    hop = np.broadcast_to(np.asarray(hop, dtype=np.float64), at.shape)
    whole, members = hop + extra, at.shape[-1]
    after, before = np.arange(1, members + 1) % members, np.arange(-1, members - 1)
    free = at.copy() if way in ("posted", "late") else np.full(at.shape, -np.inf)
    for _ in range(number):
        come = at.take(before, axis=-1)
        if way == "eager":
            at = np.maximum(at, come) + whole
        elif way == "rendezvous":
            received = np.maximum(at, come) + whole
            at = np.maximum(received, received.take(after, axis=-1))
        else:
            start = np.maximum(come, free)
            arrives = start + whole
            # A message that only travels longer does not keep the next one.
            free = start + hop if way == "late" else arrives
            sent = arrives if way in ("posted", "sending") else start + hop
            at = np.maximum(arrives, sent.take(after, axis=-1))
    return at


def fit_ring(
    samples: Samples,
    labels: Sequence[Label],
    healthy_ns: float | None,
    more: Sequence[Hops] = (),
    *,
    least_amplitude: float = 0.0,
    crossing: Sequence[int] = (),
) -> RingFit | None:
    """Fit every single hop, and the sets of hops ``more``, to the members' exits.

    ``crossing``: the hops between nodes, where others are within one. Then all of the ring, or all that
    crosses, may be slow too, and makes a pattern of its own: a hop has to fit clearly better.

    ``healthy_ns``: what the operation takes when nothing is slow; None if it is not known and to be
    fitted as well. Returns None where there is nothing to fit: too few samples, members that did not
    wait, or exits that do not differ by ``least_amplitude`` of the whole operation.
    """
    usable = np.isfinite(samples.exit).all(axis=1)
    at = np.flatnonzero(usable)
    if len(at) < 6 or samples.exit.shape[1] < 3:
        return None
    most = max(6, min(_MOST_SAMPLES, _MOST_TIMES // samples.exit.shape[1]))
    at = at[np.linspace(0, len(at) - 1, min(len(at), most)).astype(np.int64)]
    arrival = samples.arrival[at].astype(np.float64)
    seen = samples.exit[at].astype(np.float64)
    members = seen.shape[1]
    sharded = any("param_sync" in op for op, _ in labels)
    number = rounds(labels[int(samples.label[at[0]])][0], members, sharded=sharded)
    whole = float(np.median(seen.max(axis=1)))
    # Pairs of a healthy hop's time and what the slow hop costs the whole ring.
    if healthy_ns is None:
        losses = whole * np.array(_PARTS)
        quick = (whole - losses) / number
    else:
        losses = (whole - healthy_ns) * np.array(_SCALES)
        quick = np.full(len(losses), healthy_ns / number)
    hop = float(quick[len(quick) // 2])
    weights = [np.ones(members)]
    mixed = 0 < len(crossing) < members
    if mixed:
        between = np.isin((np.arange(members) - 1) % members, list(crossing))
        weights = [np.where(between, 1.0, inside) for inside in _INSIDE]
    # Members begin when they arrive, or all of them when the last has.
    starts = (arrival, np.zeros((1, members)))
    if whole <= 0 or (healthy_ns is not None and whole <= healthy_ns):
        return None
    healthy = ring_exits(arrival, hop, np.zeros(members), number, "eager")
    beyond = _centred(seen - healthy)
    pattern = np.median(beyond, axis=0)
    size = float((pattern**2).sum())
    error = np.array([spread(beyond[:, each]) for each in range(members)]) / np.sqrt(len(at))
    if size < 9.0 * float((error**2).sum()) or np.ptp(pattern) < least_amplitude * whole:
        return None
    # Errors below what the samples' noise leaves, or below a fiftieth of the pattern, are no difference.
    least = max(float((error**2).sum()), 4e-4 * size)

    groups: list[Hops] = [tuple(range(members)), tuple(crossing)] if mixed else []
    candidates = [*_candidates(pattern), *more, *(each for each in groups if each not in more)]
    places = np.zeros((len(candidates), 1, 1, members))
    for row, hops in enumerate(candidates):
        for sender in hops:
            places[row, ..., (sender + 1) % members] = 1.0
    remains, costs = np.full(len(candidates), np.inf), np.zeros(len(candidates))
    arrived = np.arange(len(candidates))
    for way in WAYS:
        for weight in weights:
            healthy_hop = quick[:, None, None] * weight
            # A quick hop has to lose its lead before it holds anybody up.
            slack = quick[:, None, None] * (1.0 - weight)
            extra = places * ((losses / _share(way, number, members))[:, None, None] + slack)
            for start in starts:
                # [candidates, losses, samples, members]
                exits = ring_exits(start, healthy_hop, extra, number, way)
                rest = (np.median(_centred(seen - exits), axis=2) ** 2).sum(axis=-1)
                if healthy_ns is not None:
                    missed = np.abs(np.median(exits.max(axis=-1), axis=2) - whole)
                    rest += np.maximum(missed - TOLERATED * (whole - healthy_ns), 0.0) ** 2
                best_loss = np.argmin(rest, axis=1)
                error_of = rest[arrived, best_loss]
                better = error_of < remains
                remains[better], costs[better] = error_of[better], losses[best_loss][better]
    remains = np.maximum(remains, least)
    whole_ring = len(candidates) - sum(each not in more for each in groups)
    everything = float(remains[whole_ring:].min(initial=np.inf))
    alone = whole_ring - len(more)
    order = np.argsort(remains[:alone], kind="stable")
    chosen, second = int(order[0]), float(remains[order[1]])
    for several in range(alone, whole_ring):
        # More hops fit more: they count only where one alone does not do.
        if remains[several] < 0.25 * remains[chosen] and remains[chosen] > 0.01 * size:
            chosen = several
    best, remaining, lost = candidates[chosen], float(remains[chosen]), float(costs[chosen])
    return RingFit(
        hops=best,
        accepted=1.0 - remaining / size >= EXPLAINED
        and remaining <= CLEARLY_BETTER * min(second, everything),
        explained=1.0 - remaining / size,
        against_second=remaining / second,
        amplitude=float(np.ptp(pattern)) / whole,
        lost_ns=lost,
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


def _share(way: Way, number: int, members: int) -> int:
    """How many times the extra time of a hop counts in what the whole ring loses."""
    return -(-number // members) if way == "late" else number


def _centred(times: Floats) -> Floats:
    """``times`` [..., members] less each sample's mean: what all members share tells of no hop."""
    centred: Floats = times - times.mean(axis=-1, keepdims=True)
    return centred
