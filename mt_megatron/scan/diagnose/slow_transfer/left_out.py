"""Units without some stretches of steps: what a fault that is over did is not what is usual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.matched_ops import Rows, Samples
from mt_megatron.scan.analysis.units import Unit


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
