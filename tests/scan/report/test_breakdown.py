"""The parts of a step, against the times that the hand-made run was written with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mt_megatron.scan.analysis.trace import open_trace
from mt_megatron.scan.format.records import KIND
from mt_megatron.scan.report.breakdown import Meetings, breakdown, look
from mt_megatron.scan.report.data import CATEGORIES, Breakdown
from tests.scan import handmade
from tests.scan.handmade import HandmadeRun, write_handmade

OWN = 2 * handmade.FORWARD + 2 * handmade.BACKWARD
MOVING = 4 * handmade.TRANSFER + handmade.REDUCE


def measure(run: Path, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[Breakdown, dict[int, float]]:
    trace = open_trace(run)
    meetings = Meetings()
    looks = []
    for rank in ranks:
        read = trace.rank(rank)
        steps = np.unique(read.spans["iteration"])
        looks.append(
            look(rank, read, steps, lambda times, r=rank: trace.clocks.to_reference(r, times), meetings)
        )
    lengths = {seen.rank: float((seen.end - seen.begin).mean()) for seen in looks}
    return breakdown(looks, meetings), lengths


def part(found: Breakdown, rank: int, name: str) -> float:
    return found.ranks[rank][CATEGORIES.index(name)]


def test_own_work_moving_and_data_are_what_was_written(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=5))
    found, lengths = measure(tmp_path)
    for rank in range(4):
        length = lengths[rank]
        assert part(found, rank, "compute") * length == pytest.approx(OWN + handmade.OPTIMIZER)
        assert part(found, rank, "data") * length == pytest.approx(handmade.DATA)
        assert part(found, rank, "exposed_communication") * length == pytest.approx(MOVING)
        assert sum(found.ranks[rank]) == pytest.approx(1.0)
    assert sum(found.overall) == pytest.approx(1.0) and found.matched == 1.0
    assert found.steps == (1, 2, 3, 4, 5)


def test_a_slow_rank_works_longer_and_its_replica_waits_in_the_collective(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=5, slow_rank=1, factor=1.5))
    found, lengths = measure(tmp_path)
    more = 0.5 * OWN
    assert part(found, 1, "compute") * lengths[1] == pytest.approx(1.5 * OWN + handmade.OPTIMIZER)
    assert part(found, 1, "waiting") == 0.0
    waited = part(found, 0, "waiting") * lengths[0]
    assert waited == pytest.approx(more, rel=1e-6)
    assert part(found, 3, "bubble") > part(found, 2, "bubble")


def test_without_the_other_side_all_of_a_communication_counts_as_exposed(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=3))
    found, _ = measure(tmp_path, ranks=(0,))
    assert found.matched == 0.0 and part(found, 0, "bubble") == part(found, 0, "waiting") == 0.0


def test_what_lies_within_a_collective_counts_once(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=3))
    trace = open_trace(tmp_path)
    read = trace.rank(0)
    inner = read.spans[read.spans["kind"] == KIND["collective"]].copy()
    inner["kind"], inner["seq"] = KIND["data"], -1
    twice = type(read)(**{**vars(read), "spans": np.concatenate((read.spans, inner))})
    before, after = Meetings(), Meetings()
    plain = breakdown([look(0, read, np.arange(4), lambda times: times, before)], before)
    doubled = breakdown([look(0, twice, np.arange(4), lambda times: times, after)], after)
    assert doubled.ranks[0] == pytest.approx(plain.ranks[0])
