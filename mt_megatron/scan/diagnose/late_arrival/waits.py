"""Ranks that keep others waiting without computing: for data, for a checkpoint, standing still."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.raised_levels import by_chance, merged_spikes, raised_levels
from mt_megatron.scan.analysis.robust import Floats, lower_median, spread
from mt_megatron.scan.analysis.step_table import StepTable, beside_peers
from mt_megatron.scan.findings.finding import Finding

from .late_finding import late_arrival

LEAST_DATA = 0.02
"""Of the step. Less data wait than this is not worth a word."""

ALONE_DATA = 0.10
"""The same where there is nobody to compare with."""

LEAST_PAUSE_NS = 2e8
"""A single stop shorter than this (or than half a step) is told only if it comes back."""

LEAST_STOP = 0.05
"""Of the step: stops that come back are counted from this on."""

SHOWS = 0.35
"""Of the stops, what must show in the steps or the own work that they fell into."""

EMPTY = 1.0
"""A queue that is seen with more batches than this keeps nobody waiting for moments."""

CHECKPOINT_RATIO = 1.4
SINGLE_CHECKPOINT_RATIO = 1.8

FEWEST_SAVES = 4
"""Checkpoints of a stage without peers that say how long they usually take beside the other stages'."""


def slow_data(table: StepTable) -> list[Finding]:
    """Ranks whose wait for batches exceeds that of their peers, constantly or again and again."""
    data = table.columns["data"]
    loads = np.nansum(data, axis=1) > 0
    found = []
    everybody = np.flatnonzero(loads)
    for rows in table.roles:
        loading = rows[loads[rows]]
        for row in loading:
            peers = loading if len(loading) >= 2 else everybody
            fraction, alone = _data_fraction(table, int(row), peers)
            others = table.columns["data"][peers[peers != row]] / table.step_ns
            found += _data_findings(table, int(row), fraction, others, alone)
    return _unless_all(table, found, len(everybody))


def _data_fraction(table: StepTable, row: int, peers: NDArray[np.int64]) -> tuple[Floats, bool]:
    share = table.columns["data"] / table.step_ns
    if len(peers) < 2:
        return share[row], True
    place = int(np.flatnonzero(peers == row)[0])
    return beside_peers(share[peers])[place], False


def _data_findings(
    table: StepTable, row: int, fraction: Floats, others: Floats, alone: bool
) -> list[Finding]:
    tests = int(np.isfinite(table.columns["data"]).sum()) * table.looks
    least = ALONE_DATA if alone else LEAST_DATA
    trust = 0.75 if alone else 1.0
    # Between two samples a queue may run dry and fill again, but then for long.
    full = (table.columns["data_queue_depth"][row] > EMPTY) & (np.nan_to_num(fraction) < ALONE_DATA)
    fraction = np.where(full, np.minimum(fraction, 0.0), fraction)
    found = []
    for raised in raised_levels(fraction, least=least, tolerated=0.25 * least, floor=0.004, tests=tests):
        outside = np.delete(fraction, slice(raised.start, raised.stop))
        if by_chance(raised, np.concatenate([outside, others.ravel()])) > 0.01:
            continue
        found.append(
            _data(table, row, raised.start, raised.stop, raised.level, raised.confidence * trust, alone)
        )
    if found:
        return found
    spikes = None
    if not alone:
        spikes = merged_spikes(fraction, others, least=max(0.1, 2 * least), mean=LEAST_DATA, fewest=4)
    if spikes is not None:
        start, stop, mean = spikes
        found.append(_data(table, row, start, stop, mean, 0.8, alone))
    return found


def _data(
    table: StepTable, row: int, start: int, stop: int, level: float, confidence: float, alone: bool
) -> Finding:
    rank = table.ranks[row]
    wait = float(np.nanmean(table.columns["data"][row, start:stop])) / 1e6
    beside = "nobody else loads data to compare with" if alone else "more than the median of its peers"
    depth = table.columns["data_queue_depth"][row, start:stop]
    evidence = [
        f"rank {rank} waits {wait:.1f} ms a step for its batches, {100 * level:.1f} % of a usual step; "
        f"{beside}"
    ]
    if np.isfinite(depth).any():
        evidence.append(f"its queue of batches held {np.nanmean(depth):.1f} on average")
    return late_arrival(
        table,
        row,
        start,
        stop,
        cause="slow_data",
        lost_fraction=level,
        confidence=confidence,
        evidence=evidence,
    )


def _unless_all(table: StepTable, found: list[Finding], loading: int) -> list[Finding]:
    """One finding where every rank that loads data waits for it: their common source is slow."""
    ranks = tuple(sorted({rank for each in found for rank in each.ranks}))
    if loading < 2 or len(ranks) < loading or len({table.places[rank].dp for rank in ranks}) < 2:
        return found
    worst = max(found, key=lambda each: each.lost_fraction)
    return [
        Finding(
            cause="slow_data",
            lateness="late_arrival",
            ranks=ranks,
            first_step=min(each.first_step for each in found),
            last_step=max(each.last_step for each in found),
            lost_fraction=worst.lost_fraction,
            confidence=0.6,
            evidence=(f"all {loading} ranks that load data wait for it", *worst.evidence),
        )
    ]


def slow_checkpoints(table: StepTable) -> list[Finding]:
    """Ranks whose checkpoints take longer than their peers' of the same step, and more so than they are
    larger."""
    checkpoint = np.where(table.columns["checkpoint"] > 0, table.columns["checkpoint"], np.nan)
    written = table.columns["checkpoint_bytes"]
    written = np.log(np.where(written > 0, written, np.nan))
    found = []
    for rows in table.roles:
        peers, ratio, single = rows, CHECKPOINT_RATIO, SINGLE_CHECKPOINT_RATIO
        if len(rows) < 2:
            # Stages write different amounts: only what is far off counts.
            peers, ratio, single = np.arange(len(table.ranks)), 2.0, 2.5
        if len(peers) < 2:
            continue
        logs = np.log(checkpoint[peers])
        more = beside_peers(written[peers])
        beside = beside_peers(logs, logs) - np.maximum(np.nan_to_num(more), 0.0)
        if len(rows) < 2:
            beside = _beyond_usual(beside)
        steady = [each - np.nanmedian(each) for each in beside if np.isfinite(each).any()]
        noise = max(spread(np.concatenate(steady)) if steady else 0.0, 0.05)
        for row in rows:
            values = beside[int(np.flatnonzero(peers == row)[0])]
            slow = np.flatnonzero(np.nan_to_num(values) >= max(np.log(ratio), min(4.0 * noise, np.log(1.8))))
            slow = _lasting(slow, np.flatnonzero(np.isfinite(values)))
            if not len(slow) or (len(slow) == 1 and values[slow[0]] < max(np.log(single), 6.0 * noise)):
                continue
            found.append(_checkpoint(table, int(row), peers, slow, values))
    return found


def _lasting(slow: NDArray[np.int64], every: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of the ``slow`` ones those from the first on from which most of ``every`` one is slow."""
    for at in range(len(slow)):
        if len(slow) - at >= 0.6 * np.sum(every >= slow[at]):
            return slow[at:]
    return slow[:0]


def _beyond_usual(beside: Floats) -> Floats:
    """``beside`` [ranks, steps] less what is usual for each rank, where enough checkpoints say so: stages
    differ in more than in bytes, such as in who publishes the whole."""
    saves = np.isfinite(beside).sum(axis=1) >= FEWEST_SAVES
    usual = np.array([np.nanmedian(row) if known else 0.0 for row, known in zip(beside, saves, strict=True)])
    found: Floats = beside - np.maximum(usual, 0.0)[:, None]
    return found


def _checkpoint(
    table: StepTable, row: int, peers: NDArray[np.int64], slow: NDArray[np.int64], ratios: Floats
) -> Finding:
    rank = table.ranks[row]
    took = table.columns["checkpoint"]
    others = [int(peer) for peer in peers if peer != row]
    extra = took[row, slow] - lower_median(took[others][:, slow])
    start, stop = int(slow[0]), int(slow[-1]) + 1
    between = (stop - start) / (len(slow) - 1) if len(slow) > 1 else len(table.iteration)
    span = between * len(slow)
    elapsed = span * table.step_ns + float(np.nansum(took[row, slow]))
    ratio = float(np.exp(np.median(ratios[slow])))
    return late_arrival(
        table,
        row,
        start,
        stop,
        cause="slow_checkpoint",
        lost_fraction=np.nansum(extra) / elapsed,
        confidence=min(0.95, 0.62 + 0.1 * len(slow) + 0.05 * min(ratio - 1.0, 2.0)),
        evidence=(
            f"rank {rank} took {np.nanmedian(took[row, slow]) / 1e6:.0f} ms for a checkpoint, "
            f"{ratio:.1f} times the median of its peers, in {len(slow)} checkpoint{'s' * (len(slow) > 1)}",
        ),
    )


def pauses(table: StepTable) -> list[Finding]:
    """Ranks whose process demonstrably stood still, once for long or again and again."""
    pause = table.columns["pause"]
    if not np.nansum(pause) > 0:
        return []
    beside = beside_peers(pause) if len(table.ranks) > 1 else pause
    fraction = beside / table.step_ns
    waits = np.nan_to_num(table.columns["run_queue_wait_ns"]) + np.nan_to_num(table.columns["throttled_ns"])
    if len(table.ranks) > 1:
        waits = np.nan_to_num(beside_peers(waits))  # on a busy machine everybody waits for a processor
    found = []
    for row in range(len(table.ranks)):
        # What waited for a processor is another cause.
        stood = np.where(waits[row] < 0.5 * np.nan_to_num(pause[row]), fraction[row], 0.0)
        longest = table.columns["longest_pause"][row]
        long = np.nan_to_num(longest) >= max(0.5 * table.step_ns, LEAST_PAUSE_NS)
        long &= stood > 0.25
        others = np.delete(fraction, row, axis=0)
        spikes = merged_spikes(stood, others, least=LEAST_STOP, mean=0.02, fewest=3)
        if spikes is not None and _shows(table, row, stood, spikes[0], spikes[1]):
            found.append(_pause(table, row, spikes[0], spikes[1], spikes[2], 0.9))
            long[spikes[0] : spikes[1]] = False
        for start, stop in _runs(long):
            mean = float(np.nanmean(stood[start:stop]))
            found.append(_pause(table, row, start, stop, mean / (1.0 + mean), 0.85))
    return found


def _shows(table: StepTable, row: int, stood: Floats, start: int, stop: int) -> bool:
    """Whether steps with stops are longer than those without, or its own work in them: the recorder's thread
    may have stood still alone."""
    hit = np.zeros(len(stood), dtype=bool)
    hit[start:stop] = stood[start:stop] >= LEAST_STOP
    if hit.all() or not hit.any():
        return True
    # Beside the steps between the stops: what else changed before or after them is another matter.
    without = ~hit
    without[:start] = without[stop:] = False
    if without.sum() < 3:
        without = ~hit
    least = SHOWS * float(stood[hit].mean()) * table.step_ns
    for name in ("step", "compute"):
        values = table.columns[name][row]
        if float(np.nanmean(values[hit]) - np.nanmedian(values[without])) >= least:
            return True
    return False


def _runs(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen.astype(np.int8), [0]))))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _pause(table: StepTable, row: int, start: int, stop: int, fraction: float, confidence: float) -> Finding:
    rank = table.ranks[row]
    pause = table.columns["pause"][row, start:stop]
    longest = float(np.nanmax(table.columns["longest_pause"][row, start:stop])) / 1e6
    collecting = table.columns["gc_pause_ns"][row, start:stop]
    evidence = [
        f"rank {rank} stood still for {np.nansum(pause) / 1e6:.0f} ms in {stop - start} "
        f"step{'s' * (stop - start > 1)}, {longest:.0f} ms at once at most, without waiting for a processor"
    ]
    if np.isfinite(collecting).any() and np.nansum(collecting) > 0.5 * np.nansum(pause):
        evidence.append("most of it was garbage collection")
    return late_arrival(
        table,
        row,
        start,
        stop,
        cause="host_pause",
        lost_fraction=fraction,
        confidence=confidence,
        evidence=evidence,
        details={"longest_ms": round(longest, 1)},
    )
