"""Tables of steps made by hand for tests of the diagnosis: heavy-tailed work, everything else zero."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scan.analysis.step_features import COLUMNS
from mt_megatron.scan.analysis.step_table import StepTable
from mt_megatron.scan.analysis.trace import Place

MS = 1e6
WORK_MS = 100.0


def heavy_tailed(shape: tuple[int, ...], seed: int, *, deviation: float = 0.03) -> NDArray[np.float64]:
    """Factors around 1: lognormal, and one in a hundred with a Pareto tail on top."""
    rng = np.random.default_rng(seed)
    factors = np.exp(deviation * rng.standard_normal(shape))
    return factors + (rng.random(shape) < 0.01) * 0.2 * rng.pareto(1.5, shape)


def table(
    *,
    dp: int = 4,
    tp: int = 1,
    pp: int = 1,
    steps: int = 40,
    seed: int = 0,
    host: Callable[[int], int] = lambda rank: rank,
    deviation: float = 0.03,
) -> StepTable:
    """Ranks in order tp, dp, pp; each step 100 ms of own work and as much again of waiting."""
    ranks = range(dp * tp * pp)
    places = {
        rank: Place(
            rank=rank,
            host=f"host{host(rank)}",
            node=host(rank),
            tp=rank % tp,
            dp=rank // tp % dp,
            pp=rank // (tp * dp),
        )
        for rank in ranks
    }
    shape = (len(ranks), steps)
    columns = {name: np.full(shape, np.nan) for name in COLUMNS}
    for name in ("data", "checkpoint", "pause", "longest_pause", "run_queue_wait_ns", "throttled_ns"):
        columns[name] = np.zeros(shape)
    columns["compute"] = WORK_MS * MS * heavy_tailed(shape, seed, deviation=deviation)
    columns["step"] = np.full(shape, 2 * WORK_MS * MS)
    return StepTable(ranks=tuple(ranks), iteration=np.arange(1, steps + 1), columns=columns, places=places)
