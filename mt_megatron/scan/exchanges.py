"""Communications seen from all sides: when the last side arrived, and how long it took from there.

Late arrival is the arriving rank's matter; what comes after it is the network's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .intervals import Times
from .records import ASYNC, KIND, OPEN, WAIT
from .robust import Floats, grouped_median
from .segments import RankTrace

_STRIDE = 1 << 20
"""More than the operations of one group in one step."""

SAMPLES_PER_STEP = 6
"""Operations per step of a group of more than two of which every member's times are kept."""

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


def rank_exchanges(rank: int, trace: RankTrace, to_reference: Callable[[Times], Times]) -> RankExchanges:
    """The communications of one rank. ``to_reference`` puts its times on the common clock."""
    spans = trace.spans[trace.spans["end"] != OPEN]
    collective = spans[(spans["kind"] == KIND["collective"]) & (spans["group"] > 0)]
    groups: dict[Group, SideLog] = {}
    for number in np.unique(collective["group"]):
        group = trace.groups.get(int(number))
        if group is None or len(group.ranks) < 2:
            continue
        rows = collective[collective["group"] == number]
        log = _side(_whole_operations(rows), trace.strings, to_reference)
        if len(log.key):
            groups[group.name, tuple(group.ranks)] = log
    sends, receives = _transfers(rank, trace, spans, to_reference)
    return RankExchanges(rank=rank, groups=groups, sends=sends, receives=receives)


def _transfers(
    rank: int, trace: RankTrace, spans: NDArray[np.void], to_reference: Callable[[Times], Times]
) -> tuple[dict[Edge, SideLog], dict[Edge, SideLog]]:
    p2p = spans[(spans["kind"] == KIND["p2p"]) & (spans["peer"] >= 0)]
    if not len(p2p):
        return {}, {}
    # Those of one call have the same times: the end is that of the slowest of them.
    order = np.lexsort((p2p["peer"], p2p["end"], p2p["begin"]))
    p2p = p2p[order]
    alone = np.ones(len(p2p), dtype=bool)
    same = (p2p["begin"][1:] == p2p["begin"][:-1]) & (p2p["end"][1:] == p2p["end"][:-1])
    same &= p2p["peer"][1:] != p2p["peer"][:-1]
    alone[1:] &= ~same
    alone[:-1] &= ~same
    table = np.zeros(1 << 16, dtype=bool)
    table[: len(trace.strings)] = [text.split("_")[0] == "send" for text in trace.strings]
    is_send = table[p2p["name"]]
    sends: dict[Edge, SideLog] = {}
    receives: dict[Edge, SideLog] = {}
    for peer in np.unique(p2p["peer"]):
        for sending, logs in ((True, sends), (False, receives)):
            rows = (p2p["peer"] == peer) & (is_send == sending)
            if not rows.any():
                continue
            chosen = _numbered(p2p[rows])
            log = _side(chosen, ["p2p"] * len(trace.strings), to_reference, shared=~alone[rows])
            logs[(rank, int(peer)) if sending else (int(peer), rank)] = log
    return sends, receives


@dataclass(frozen=True, kw_only=True)
class _Operations:
    rows: NDArray[np.void]
    begin: Times
    end: Times
    waited: NDArray[np.bool_]


def _numbered(rows: NDArray[np.void]) -> _Operations:
    return _Operations(rows=rows, begin=_begin(rows), end=_end(rows), waited=(rows["flags"] & ASYNC) == 0)


def _whole_operations(rows: NDArray[np.void]) -> _Operations:
    """Starts joined with their waits; starts that nobody waited for are left out."""
    background = (rows["flags"] & (ASYNC | WAIT)) != 0
    if not background.any():
        return _numbered(rows)
    starts = rows[(rows["flags"] & ASYNC) != 0]
    waits = rows[(rows["flags"] & WAIT) != 0]
    starts = starts[np.unique(starts["seq"], return_index=True)[1]]
    waits = waits[np.unique(waits["seq"], return_index=True)[1]]
    _, at, of = np.intersect1d(starts["seq"], waits["seq"], return_indices=True)
    starts, waits = starts[at], waits[of]
    plain = rows[~background]
    timed = starts["device_end"] > 0
    wait_ns = waits["end"] - waits["begin"]
    length = np.maximum(waits["end"] - starts["begin"], 1)
    end = np.where(timed, starts["device_end"], waits["end"])
    joined = _Operations(
        rows=np.concatenate((plain, starts)),
        begin=np.concatenate((_begin(plain), _begin(starts))),
        end=np.concatenate((_end(plain), end)).astype(np.int64),
        # A wait that took no time says that it was over before, not when.
        waited=np.concatenate((np.ones(len(plain), dtype=bool), timed | (wait_ns > 0.05 * length))),
    )
    order = np.argsort(joined.rows["seq"], kind="stable")
    return _Operations(
        rows=joined.rows[order], begin=joined.begin[order], end=joined.end[order], waited=joined.waited[order]
    )


def _begin(rows: NDArray[np.void]) -> Times:
    return np.where(rows["device_end"] > 0, rows["device_begin"], rows["begin"]).astype(np.int64)


def _end(rows: NDArray[np.void]) -> Times:
    return np.where(rows["device_end"] > 0, rows["device_end"], rows["end"]).astype(np.int64)


def _side(
    operations: _Operations,
    strings: Sequence[str],
    to_reference: Callable[[Times], Times],
    shared: NDArray[np.bool_] | None = None,
) -> SideLog:
    rows = operations.rows
    octaves = np.rint(2.0 * np.log2(np.maximum(rows["bytes"], 1)))
    size = np.where(rows["bytes"] > 0, octaves, -1).astype(np.int64)
    combined = rows["name"].astype(np.int64) * 1024 + size + 1
    distinct, label = np.unique(combined, return_inverse=True)
    labels = [(strings[each // 1024], int(each % 1024) - 1) for each in distinct.tolist()]
    return SideLog(
        key=rows["seq"].astype(np.int64),
        iteration=rows["iteration"].astype(np.int64),
        begin=to_reference(operations.begin),
        end=to_reference(operations.end),
        label=label.astype(np.int64),
        labels=labels,
        shared=np.zeros(len(rows), dtype=bool) if shared is None else shared,
        waited=operations.waited,
    )


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
    known = waited.any(axis=1)
    exits = np.where(waited, ends, np.iinfo(np.int64).min).max(axis=1) if len(begins) else arrived
    own = (ends - begins).min(axis=1).astype(np.float64) if len(begins) else np.empty(0)
    seen = _time(exits - arrived, own, clock_error)
    rows = _rows(iteration[known], label[known], seen[known])
    kept = None
    if samples and len(begins):
        chosen = _spread_out(iteration, label, seen, known)
        kept = Samples(
            iteration=iteration[chosen],
            label=label[chosen],
            arrival=(begins[chosen] - arrived[chosen, None]).astype(np.float32),
            exit=np.where(waited[chosen], ends[chosen] - arrived[chosen, None], np.nan).astype(np.float32),
        )
    return rows, kept


def edge_rows(send: SideLog, receive: SideLog, labels: Labels, clock_error: float) -> Rows:
    """What both sides together say of the transfers of one edge."""
    of_send, of_receive = matched([send, receive])
    arrived = np.maximum(send.begin[of_send], receive.begin[of_receive])
    exits = receive.end[of_receive]
    own = np.minimum(
        send.end[of_send] - send.begin[of_send], receive.end[of_receive] - receive.begin[of_receive]
    ).astype(np.float64)
    seen = _time(exits - arrived, own, clock_error)
    alone = ~receive.shared[of_receive]
    known = receive.waited[of_receive]
    local = np.array([labels.number(each) for each in receive.labels], dtype=np.int64)
    label = local[receive.label[of_receive]]
    iteration = receive.iteration[of_receive]
    if (alone & known).sum() >= 0.2 * max(known.sum(), 1):
        known &= alone
    else:
        # Every end is shared: what the sender saw bounds it, unless sending is only handing over.
        bound = np.minimum(exits, send.end[of_send]) - arrived
        handed_over = np.median(send.end[of_send] - send.begin[of_send]) < 0.2 * np.median(
            receive.end[of_receive] - receive.begin[of_receive]
        )
        if not handed_over:
            seen = np.where(alone, seen, np.minimum(seen, np.maximum(bound, 0)))
    return _rows(iteration[known], label[known], seen[known])


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
    iteration: NDArray[np.int64], label: NDArray[np.int64], seen: Floats, known: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """A few operations per step of the label that takes most time in all."""
    if not known.any():
        return np.empty(0, dtype=np.int64)
    total = np.bincount(label[known], weights=seen[known])
    rows = np.flatnonzero(known & (label == int(np.argmax(total))))
    steps = iteration[rows]
    first = np.concatenate(([True], steps[1:] != steps[:-1]))
    starts = np.flatnonzero(first)
    counts = np.diff(np.concatenate((starts, [len(rows)])))
    position = np.arange(len(rows)) - np.repeat(starts, counts)
    stride = np.repeat(np.maximum(counts // SAMPLES_PER_STEP, 1), counts)
    chosen: NDArray[np.int64] = rows[(position % stride == 0) & (position // stride < SAMPLES_PER_STEP)]
    return chosen
