"""Which groups and edges transfer more slowly than comparable ones, or than they did before.

``leaving_out``: units without the steps of a fault that is over; these are not what is usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.matched_ops import Rows, Samples
from mt_megatron.scan.analysis.raised_levels import Raised, raised_levels
from mt_megatron.scan.analysis.robust import Floats, noise
from mt_megatron.scan.analysis.units import LEAST_EXTRA_NS, LEAST_LOSS, SlowUnit, Unit
from mt_megatron.scan.diagnose.late_arrival.stages import above_past

LEAST_RATIO = log(1.35)
"""Transfers vary; a link in trouble takes more than a third longer."""

TOLERATED_RATIO = log(1.12)
_FLOOR = 0.04


def slow_units(
    units: Sequence[Unit], iteration: NDArray[np.int64], step_ns: float, *, looks: int = 1
) -> list[SlowUnit]:
    """The units whose transfers are slow; ``iteration`` [steps] are looked at ``looks`` times."""
    classes: dict[tuple[str, int, bool, bool], list[Unit]] = {}
    for unit in units:
        classes.setdefault((unit.name, len(unit.ranks), unit.is_edge, unit.crosses), []).append(unit)
    tests = max(len(units) * len(iteration), 1) * looks
    found: list[SlowUnit] = []
    for members in classes.values():
        found += _of_class(members, iteration, step_ns, tests)
    return found


def _of_class(
    units: Sequence[Unit], iteration: NDArray[np.int64], step_ns: float, tests: int
) -> list[SlowUnit]:
    labels = np.unique(np.concatenate([unit.rows.label for unit in units]))
    # The two directions of one link are no measure for each other.
    several = len({frozenset(unit.ranks) for unit in units}) > 1
    shape = (len(units), len(iteration))
    cost, normal, alone = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    operations = np.zeros(shape)
    typical = np.zeros((len(units), len(labels)))
    share = np.zeros((len(units), len(labels)))
    for column, label in enumerate(labels.tolist()):
        time, count = _matrix(units, label, iteration)
        reference = _reference(time) if several else np.full(time.shape, np.nan)
        total = np.nan_to_num(time * count)
        paired = np.isfinite(reference) & np.isfinite(time)
        cost += np.where(paired, total, 0.0)
        normal += np.where(paired, np.nan_to_num(reference * count), 0.0)
        alone += np.where(paired, 0.0, total)
        operations += np.nan_to_num(count)
        share[:, column] = total.sum(axis=1)
        typical[:, column] = _typical(reference, time)
    with np.errstate(all="ignore"):
        each = np.where(operations > 0, operations, np.nan)
        compared = np.where(cost > 0, cost, np.nan) / each
        # Beside the past one operation is compared: how many can be judged differs from step to step.
        single = np.where(alone > 0, alone, np.nan) / each
    together, held = _stabilised(compared)
    risen = [_raised(series, True, tests) for series in together]
    by_itself, started = _stabilised(single)
    found: list[SlowUnit] = []
    for row, unit in enumerate(units):
        main = typical[row, int(np.argmax(share[row]))]
        by_past = bool(alone[row].sum() > cost[row].sum())
        host = 0.0
        with np.errstate(all="ignore"):
            if by_past:
                series, host, seen = by_itself[row], float(started[row]), alone[row]
            else:
                series = np.log(cost[row] / normal[row])
                series[~np.isfinite(series)] = np.nan
                seen = cost[row]
        stretches = _raised(series, by_past, tests)
        everywhere = False
        if not stretches and not by_past:
            # Like its peers, or nearly: but was it quicker before, and were all of them?
            stretches, host = risen[row], float(held[row])
            everywhere = 2 * sum(map(bool, risen)) > len(units)
        for raised in stretches:
            inside = slice(raised.start, raised.stop)
            slowed = float(np.nanmean(np.where(seen[inside] > 0, seen[inside], np.nan)))
            number = max(float(operations[row, inside].mean()), 1e-9)
            usual = max((slowed + host * number) * exp(-raised.level) - host * number, 0.0)
            lost = slowed - usual
            extra = lost / number
            if lost < LEAST_LOSS * step_ns or extra < max(LEAST_EXTRA_NS, 3.0 * _finite(unit.clock_error)):
                continue
            found.append(
                SlowUnit(
                    unit=unit,
                    ratio=slowed / max(usual, number) if host else exp(raised.level),
                    confidence=raised.confidence,
                    certainty=raised.certainty,
                    first_step=int(iteration[raised.start]),
                    last_step=int(iteration[raised.stop - 1]),
                    lost_ns=lost,
                    extra_ns=extra,
                    # Where all became slow the others do not say what is healthy.
                    healthy_ns=usual / number if everywhere else main,
                    by_past=by_past or stretches is risen[row],
                    everywhere=everywhere,
                )
            )
    return found


def _stabilised(times: Floats) -> tuple[Floats, Floats]:
    """Logarithms of ``times`` [units, steps, ns] plus the noise of each unit's times, and that noise [units].

    What the hosts add to a transfer (a rank or a thread that has to wait for a processor) does not grow with
    it: where the wire takes 0.2 ms, 3 ms of that are a factor of 15, and a fault of 20 ms would not stand out
    from them in plain logarithms. Where noise is a small share of the times nothing changes.
    """
    started = np.array([noise(row) for row in times])
    with np.errstate(all="ignore"):
        return np.log(times + started[:, None]), started


def _finite(value: float) -> float:
    # Without a common clock times are shortest times, which no clock falsifies.
    return value if np.isfinite(value) else 0.0


def _raised(series: Floats, by_past: bool, tests: int) -> list[Raised]:
    if by_past:
        return above_past(series, least=LEAST_RATIO, tests=tests, floor=_FLOOR)
    return raised_levels(series, least=LEAST_RATIO, tolerated=TOLERATED_RATIO, floor=_FLOOR, tests=tests)


def _matrix(units: Iterable[Unit], label: int, iteration: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Time and number of the operations of one label per unit and step; NaN where there is none."""
    times, counts = [], []
    for unit in units:
        time, count = np.full(len(iteration), np.nan), np.full(len(iteration), np.nan)
        rows = unit.rows.label == label
        place = np.searchsorted(iteration, unit.rows.iteration[rows])
        fits = place < len(iteration)
        fits[fits] &= iteration[place[fits]] == unit.rows.iteration[rows][fits]
        time[place[fits]] = unit.rows.time[rows][fits]
        count[place[fits]] = unit.rows.count[rows][fits]
        times.append(time)
        counts.append(count)
    return np.stack(times), np.stack(counts)


def _reference(time: Floats) -> Floats:
    """For each unit what the faster ones of the others take in the same step; NaN without others.

    The lower third: whatever is wrong with the others, faults make nothing faster.
    """
    found = np.full(time.shape, np.nan)
    if len(time) < 2:
        return found
    padded = np.where(np.isnan(time), np.inf, time)
    ordered = np.sort(padded, axis=0)
    present = np.isfinite(padded).sum(axis=0)
    ranks = np.argsort(np.argsort(padded, axis=0, kind="stable"), axis=0)
    for row in range(len(time)):
        others = present - np.isfinite(padded[row])
        place = np.maximum(others - 1, 0) // 3
        # Leave the unit itself out of the order.
        place = np.where(np.isfinite(padded[row]) & (ranks[row] <= place), place + 1, place)
        value = ordered[np.minimum(place, len(time) - 1), np.arange(time.shape[1])]
        found[row] = np.where((others > 0) & np.isfinite(value), np.maximum(value, 1.0), np.nan)
    return found


def _typical(reference: Floats, time: Floats) -> Floats:
    """Per unit the healthy time of the label: the others', else the lower quarter of its own."""
    found = np.zeros(len(time))
    for row in range(len(time)):
        others = reference[row][np.isfinite(reference[row])]
        own = time[row][np.isfinite(time[row])]
        if len(others):
            found[row] = float(np.median(others))
        elif len(own):
            found[row] = float(np.quantile(own, 0.1))
    return found


def leaving_out(units: Sequence[Unit], stretches: Sequence[tuple[int, int]]) -> list[Unit]:
    """``units`` without their operations in the steps of ``stretches`` (first and last step); those of which
    nothing is left are gone."""
    if not stretches:
        return list(units)
    found = []
    for unit in units:
        rows = _rows(unit.rows, _outside(unit.rows.iteration, stretches))
        samples = unit.samples
        if samples is not None:
            samples = _samples(samples, _outside(samples.iteration, stretches))
        others = tuple(_samples(each, _outside(each.iteration, stretches)) for each in unit.others)
        if len(rows.time):
            found.append(replace(unit, rows=rows, samples=samples, others=others))
    return found


def _outside(iteration: NDArray[np.int64], stretches: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    outside = np.ones(len(iteration), dtype=bool)
    for first, last in stretches:
        outside &= (iteration < first) | (iteration > last)
    return outside


def _rows(rows: Rows, kept: NDArray[np.bool_]) -> Rows:
    return Rows(**{each.name: getattr(rows, each.name)[kept] for each in fields(rows)})


def _samples(samples: Samples, kept: NDArray[np.bool_]) -> Samples:
    return Samples(**{each.name: getattr(samples, each.name)[kept] for each in fields(samples)})
