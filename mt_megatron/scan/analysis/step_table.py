"""All ranks' steps side by side, and what a rank differs by from its peers in the same step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .robust import Floats, lower_median
from .step_features import COLUMNS, RankSteps, own_work
from .trace import Place

FEWEST_STEPS = 8
"""Of more steps than these the first is left out: memory is got, kernels are built, connections made."""


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Columns of ``RankSteps`` as arrays [ranks, steps], NaN where a rank has no such step."""

    ranks: tuple[int, ...]
    iteration: NDArray[np.int64]
    """[steps], ascending."""

    columns: Mapping[str, Floats]
    places: Mapping[int, Place]
    looks: int = 1
    """How often these steps are looked at in all: what is tested often needs a higher bar."""

    @cached_property
    def step_ns(self) -> float:
        """The run's median step."""
        steps = self.columns["step"]
        return float(np.nanmedian(steps)) if np.isfinite(steps).any() else float("nan")

    @cached_property
    def roles(self) -> list[NDArray[np.int64]]:
        """Rows of the ranks that do the same: those of each pipeline stage."""
        stages: dict[int, list[int]] = {}
        for row, rank in enumerate(self.ranks):
            stages.setdefault(self.places[rank].pp, []).append(row)
        return [np.array(rows, dtype=np.int64) for _, rows in sorted(stages.items())]

    def steps(self, start: int, stop: int) -> tuple[int, int]:
        """Iterations of the first and last of the positions ``start`` to ``stop - 1``."""
        return int(self.iteration[start]), int(self.iteration[stop - 1])

    def host(self, rank: int) -> str | None:
        """Its host's name."""
        return self.places[rank].host or None


def step_table(
    parts: Iterable[RankSteps],
    places: Mapping[int, Place],
    *,
    first_step: int | None = None,
    last_step: int | None = None,
    looks: int = 1,
    without: Iterable[tuple[int, int]] = (),
) -> StepTable:
    """One table of all ``parts`` (several of one rank are joined), restricted to the steps asked for and
    ``without`` some stretches of them (first and last step)."""
    by_rank: dict[int, list[RankSteps]] = {}
    for part in parts:
        by_rank.setdefault(part.rank, []).append(part)
    every = [part.iteration for rows in by_rank.values() for part in rows]
    grid = np.unique(np.concatenate(every)) if every else np.empty(0, dtype=np.int64)
    if first_step is not None:
        grid = grid[grid >= first_step]
    if last_step is not None:
        grid = grid[grid <= last_step]
    if len(grid) > FEWEST_STEPS and first_step is None:
        grid = grid[1:]
    for first, last in without:
        grid = grid[(grid < first) | (grid > last)]
    ranks = tuple(sorted(by_rank))
    columns = {name: np.full((len(ranks), len(grid)), np.nan) for name in COLUMNS}
    for row, rank in enumerate(ranks):
        for part in by_rank[rank]:
            place = np.searchsorted(grid, part.iteration)
            fits = (place < len(grid)) & np.isin(part.iteration, grid)
            for name in COLUMNS:
                columns[name][row, place[fits]] = part.columns[name][fits]
    table = StepTable(ranks=ranks, iteration=grid, columns=columns, places=places, looks=looks)
    own = columns["phases"] + columns["other"]
    compared = [rows for rows in table.roles if len(rows) > 1]
    if alone := [rows for rows in table.roles if len(rows) == 1]:
        # Stages of one rank each have no peers inside: they are compared with each other.
        compared.append(np.concatenate(alone))
    for rows in compared:
        # Decided again for those that are compared: each part of each rank has decided for itself alone.
        columns["compute"][rows] = own_work(columns["phases"][rows], own[rows])
    return table


def beside_peers(values: Floats, peers: Floats | None = None) -> Floats:
    """Each row of ``values`` [ranks, steps] less the median of the other rows in the same step.

    ``peers``: the rows to compare with, in the same order, where some values are not to be believed (NaN).
    NaN where there is no other.
    """
    peers = values if peers is None else peers
    if len(values) < 2:
        return np.full(values.shape, np.nan)
    # Sorted once; leaving a row out moves the middle by what lies below it.
    order = np.argsort(peers, axis=0, kind="stable")
    position = np.empty_like(order)
    np.put_along_axis(position, order, np.arange(len(peers))[:, None], axis=0)
    ordered = np.take_along_axis(peers, order, axis=0)
    there = ~np.isnan(peers)
    others = there.sum(axis=0) - there
    low, high = np.maximum(others - 1, 0) // 2, others // 2
    low += there & (position <= low)
    high += there & (position <= high)
    last = len(peers) - 1
    middle = np.take_along_axis(ordered, np.minimum(low, last), axis=0)
    middle = (middle + np.take_along_axis(ordered, np.minimum(high, last), axis=0)) / 2.0
    found: Floats = np.where(others > 0, values - middle, np.nan)
    return found


def excess_over_peers(values: Floats, row: int, peers: Sequence[int], chosen: NDArray[np.bool_]) -> float:
    """Mean over the ``chosen`` steps of what ``row`` has more than the middle one of ``peers``."""
    others = [peer for peer in peers if peer != row]
    with np.errstate(all="ignore"):
        own = values[row, chosen]
        if not others or not np.isfinite(own).any():
            return float("nan")
        reference = lower_median(values[others][:, chosen])
        difference = own - reference
        return float(np.nanmean(difference)) if np.isfinite(difference).any() else float("nan")
