"""Steps of several ranks side by side: what counts as own work is one measure for all that are compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mt_megatron.scan.analysis.step_features import RankSteps, rank_steps
from mt_megatron.scan.analysis.step_table import step_table
from mt_megatron.scan.analysis.trace import Place
from mt_megatron.scan.format.records import COUNTER, KIND, SPAN

MS = 1_000_000
STEP = 100 * MS


def steps(rank: int, forward: int, *, first: int = 1, count: int = 4) -> RankSteps:
    """``count`` steps of 100 ms of own work, of which ``forward`` ms are recorded as a forward pass."""
    spans = np.zeros(2 * count, dtype=SPAN)
    spans["iteration"] = first + np.arange(2 * count) // 2
    spans["begin"] = spans["iteration"].astype(np.int64) * STEP
    spans["kind"][::2], spans["kind"][1::2] = KIND["step"], KIND["forward"]
    spans["end"][::2], spans["end"][1::2] = spans["begin"][::2] + STEP, spans["begin"][1::2] + forward * MS
    trace: Any = SimpleNamespace(spans=spans, counters=np.zeros(0, COUNTER), strings=[""], meta={})
    return rank_steps(rank, trace)


def own_work(*parts: RankSteps, stages: dict[int, int] | None = None) -> list[list[float]]:
    ranks = {part.rank for part in parts}
    places = {rank: Place(rank=rank, pp=(stages or {}).get(rank, 0)) for rank in ranks}
    return [[float(each) / MS for each in row] for row in step_table(parts, places).columns["compute"]]


@pytest.mark.parametrize(("forward", "other", "measures"), [(31, 31, (31, 31)), (29, 31, (100, 100))])
def test_ranks_of_a_stage_are_measured_alike(forward: int, other: int, measures: tuple[int, int]) -> None:
    found = own_work(steps(0, forward), steps(1, other))
    assert [np.mean(row) for row in found] == list(measures)


def test_each_stage_of_several_ranks_has_a_measure_of_its_own() -> None:
    found = own_work(steps(0, 29), steps(1, 31), steps(2, 31), steps(3, 31), stages={2: 1, 3: 1})
    assert [np.mean(row) for row in found] == [100, 100, 31, 31]


def test_stages_of_one_rank_each_are_measured_alike() -> None:
    found = own_work(steps(0, 29), steps(1, 31), stages={1: 1})
    assert [np.mean(row) for row in found] == [100, 100]


def test_a_part_of_few_phases_does_not_change_the_measure() -> None:
    (own,) = own_work(steps(0, 60), steps(0, 10, first=5, count=1), steps(0, 60, first=6))
    assert own[4 - 1] == 10 and sorted(own)[1:] == [60.0] * 7
