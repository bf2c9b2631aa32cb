"""Communications seen from all sides: when the last side arrived, and how long it took from there.

Late arrival is the arriving rank's matter; what comes after it is the network's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .intervals import Times
from .robust import Floats, grouped_median

_STRIDE = 1 << 20
"""More than the operations of one group in one step."""

SAMPLES_PER_STEP = 6
"""Operations per step and label of a group of more than two of which every member's times are kept."""

Label = tuple[str, int]
"""What makes two operations comparable: the name, and the size in half octaves (-1: unknown)."""


@dataclass(frozen=True, kw_only=True)
class SideLog:
    """One rank's operations in one group or on one edge, in their order."""

    key: NDArray[np.int64]
    """Number of the operation, ``seq``."""

    iteration: NDArray[np.int64]
    begin: Times
    """On the common clock: when this side was ready."""

    end: Times
    label: NDArray[np.int64]
    """Position in ``labels``."""

    labels: Sequence[Label]
    shared: NDArray[np.bool_]
    """Whether ``end`` is that of a batch with transfers to somebody else."""

    waited: NDArray[np.bool_]
    """False where ``end`` is only when somebody looked: it may have been over before."""


Group = tuple[str, tuple[int, ...]]
"""Name and global ranks."""

Edge = tuple[int, int]
"""Sender and receiver."""


@dataclass(frozen=True, kw_only=True)
class RankExchanges:
    """What one rank exchanged with others."""

    rank: int
    groups: Mapping[Group, SideLog]
    sends: Mapping[Edge, SideLog]
    receives: Mapping[Edge, SideLog]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Times of one group or edge per step and label; columns [rows]."""

    iteration: NDArray[np.int64]
    label: NDArray[np.int64]
    """Position in the table of labels of the whole analysis."""

    count: NDArray[np.int64]
    time: Floats
    """ns from the last arrival to the last exit; the median."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Single operations of a group with every member's times, ns from the last arrival."""

    iteration: NDArray[np.int64]
    """[samples]"""

    label: NDArray[np.int64]
    arrival: NDArray[np.float32]
    """[samples, members], zero or below."""

    exit: NDArray[np.float32]
    """[samples, members]; NaN where a member did not wait."""

    def take(self, rows: NDArray[np.bool_]) -> Samples:
        """Those ``rows``."""
        return Samples(
            iteration=self.iteration[rows],
            label=self.label[rows],
            arrival=self.arrival[rows],
            exit=self.exit[rows],
        )


@dataclass
class Labels:
    """Numbers of labels over all ranks."""

    numbers: dict[Label, int] = field(default_factory=dict)

    def number(self, label: Label) -> int:
        """The same for equal labels."""
        return self.numbers.setdefault(label, len(self.numbers))

    def names(self) -> list[Label]:
        """By number."""
        return list(self.numbers)


def matched(logs: Sequence[SideLog]) -> list[NDArray[np.int64]]:
    """Positions of the operations that all ``logs`` have, by their number; one array per log.

    Where the numbers do not fit (a side that began to count later), by the order within each step.
    """
    keys = [log.key for log in logs]
    if all((key >= 0).all() for key in keys):
        at = _common(keys)
        steps = np.stack([log.iteration[which] for log, which in zip(logs, at, strict=True)])
        same = (steps == steps[0]).all(axis=0)
        if same.any() and same.mean() > 0.9:
            return at if same.all() else [which[same] for which in at]
    return _common([_by_step(log) for log in logs])


def _by_step(log: SideLog) -> NDArray[np.int64]:
    order = np.lexsort((log.key, log.begin, log.iteration))
    iteration = log.iteration[order]
    first = np.concatenate(([True], iteration[1:] != iteration[:-1]))
    starts = np.flatnonzero(first)
    position = np.arange(len(order)) - starts[np.cumsum(first) - 1]
    keys = np.empty(len(order), dtype=np.int64)
    keys[order] = iteration * _STRIDE + position
    return keys


def _common(keys: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    first = keys[0]
    rising = bool((np.diff(first) > 0).all())
    if rising and all(np.array_equal(key, first) for key in keys[1:]):
        return [np.arange(len(first))] * len(keys)
    common = np.unique(first)
    for key in keys[1:]:
        common = np.intersect1d(common, key)
    positions = []
    for key in keys:
        distinct, index = np.unique(key, return_index=True)
        positions.append(index[np.searchsorted(distinct, common)])
    return positions


def group_rows(
    logs: Sequence[SideLog], labels: Labels, clock_error: float, *, samples: bool
) -> tuple[Rows, Samples | None]:
    """What all members together say of one group's collectives."""
    at = matched(logs)
    begins = np.stack([log.begin[which] for log, which in zip(logs, at, strict=True)], axis=1)
    ends = np.stack([log.end[which] for log, which in zip(logs, at, strict=True)], axis=1)
    waited = np.stack([log.waited[which] for log, which in zip(logs, at, strict=True)], axis=1)
    local = np.array([labels.number(each) for each in logs[0].labels], dtype=np.int64)
    label = local[logs[0].label[at[0]]] if len(local) else np.empty(0, dtype=np.int64)
    iteration = logs[0].iteration[at[0]]
    arrived = begins.max(axis=1) if len(begins) else np.empty(0, dtype=np.int64)
    known: NDArray[np.bool_] = np.any(waited, axis=1)
    exits = np.where(waited, ends, np.iinfo(np.int64).min).max(axis=1) if len(begins) else arrived
    own = (ends - begins).min(axis=1).astype(np.float64) if len(begins) else np.empty(0)
    seen = _time(exits - arrived, own, clock_error)
    rows = _rows(iteration[known], label[known], seen[known])
    kept = None
    if samples and len(begins):
        chosen = _spread_out(iteration, label, seen, known, [name for name, _ in labels.names()])
        kept = Samples(
            iteration=iteration[chosen],
            label=label[chosen],
            arrival=(begins[chosen] - arrived[chosen, None]).astype(np.float32),
            exit=np.where(waited[chosen], ends[chosen] - arrived[chosen, None], np.nan).astype(np.float32),
        )
    return rows, kept


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Both sides of an edge's transfers; columns [transfers], ns on the common clock."""

    send_begin: Times
    send_end: Times
    receive_begin: Times
    receive_end: Times
    ready: Times
    """The later of both begins."""

    iteration: NDArray[np.int64]
    label: NDArray[np.int64]
    """Position in the table of labels of the whole analysis."""

    waited: NDArray[np.bool_]
    shared: NDArray[np.bool_]
    """Whether the receiver's end is that of a call with transfers from or to others as well."""


def edge_transfers(send: SideLog, receive: SideLog, labels: Labels) -> Transfers:
    """The transfers that both sides recorded."""
    of_send, of_receive = matched([send, receive])
    local = np.array([labels.number(each) for each in receive.labels], dtype=np.int64)
    return Transfers(
        send_begin=send.begin[of_send],
        send_end=send.end[of_send],
        receive_begin=receive.begin[of_receive],
        receive_end=receive.end[of_receive],
        ready=np.maximum(send.begin[of_send], receive.begin[of_receive]),
        iteration=receive.iteration[of_receive],
        label=local[receive.label[of_receive]],
        waited=receive.waited[of_receive],
        shared=receive.shared[of_receive],
    )


def edge_rows(found: Transfers, clock_error: float, chosen: NDArray[np.bool_] | None = None) -> Rows:
    """Times of an edge's transfers from the moment both sides are ready to the receiver's end; of those
    ``chosen``, where not every end is its own."""
    own = np.minimum(found.send_end - found.send_begin, found.receive_end - found.receive_begin)
    if chosen is not None:
        # Calls wait for all of their transfers: how long they lasted bounds none of them from below.
        own = np.zeros_like(own) if np.isfinite(clock_error) else own
    seen = _time(found.receive_end - found.ready, own.astype(np.float64), clock_error)
    known = found.waited if chosen is None else found.waited & chosen
    return _rows(found.iteration[known], found.label[known], seen[known])


def _time(aligned: NDArray[np.int64], own: Floats, clock_error: float) -> Floats:
    """The transfer's time: never longer than the times of all sides and the clocks' errors prove."""
    shortest = np.maximum(own, 0.0)
    if not np.isfinite(clock_error):
        return shortest
    found: Floats = np.maximum(np.minimum(aligned.astype(np.float64), np.inf) - clock_error, 0.0)
    return np.maximum(found, shortest) if clock_error > 0 else found


def _rows(iteration: NDArray[np.int64], label: NDArray[np.int64], seen: Floats) -> Rows:
    keys, middle, counts = grouped_median(iteration * _STRIDE + label, seen)
    return Rows(iteration=keys // _STRIDE, label=keys % _STRIDE, count=counts, time=middle)


def _spread_out(
    iteration: NDArray[np.int64],
    label: NDArray[np.int64],
    seen: Floats,
    known: NDArray[np.bool_],
    names: Sequence[str],
) -> NDArray[np.int64]:
    """A few operations per step of the label that takes most time in all, and of the one of another name
    that does: what does not show in the one may show in the other."""
    if not known.any():
        return np.empty(0, dtype=np.int64)
    total = np.bincount(label[known], weights=seen[known])
    first = int(np.argmax(total))
    others = [each for each in np.flatnonzero(total).tolist() if names[each] != names[first]]
    second = [max(others, key=lambda each: float(total[each]))] if others else []
    parts = [_few_per_step(iteration, np.flatnonzero(known & (label == each))) for each in (first, *second)]
    return np.sort(np.concatenate(parts))


def _few_per_step(iteration: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    steps = iteration[rows]
    first = np.concatenate(([True], steps[1:] != steps[:-1]))
    starts = np.flatnonzero(first)
    counts = np.diff(np.concatenate((starts, [len(rows)])))
    position = np.arange(len(rows)) - np.repeat(starts, counts)
    stride = np.repeat(np.maximum(counts // SAMPLES_PER_STEP, 1), counts)
    chosen: NDArray[np.int64] = rows[(position % stride == 0) & (position // stride < SAMPLES_PER_STEP)]
    return chosen
