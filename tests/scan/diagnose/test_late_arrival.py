"""Late arrival: the right rank and the right cause, and silence where there is nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mt_megatron.scan.diagnose.late_arrival.own_work import slow_ranks
from mt_megatron.scan.diagnose.late_arrival.stages import slow_stages
from mt_megatron.scan.diagnose.late_arrival.waits import pauses, slow_checkpoints, slow_data
from mt_megatron.scan.diagnose.merge_findings import merged
from mt_megatron.scan.findings.finding import Finding

from .step_tables import MS, table


def named(found: list[Finding]) -> list[tuple[str, tuple[int, ...]]]:
    return sorted((each.cause, each.ranks) for each in found)


def test_says_nothing_of_ten_thousand_steps_with_heavy_tailed_jitter() -> None:
    clean = table(dp=4, tp=1, pp=2, steps=10_000, seed=1)
    waits = np.abs(np.random.default_rng(2).standard_cauchy((8, 10_000))).clip(0, 50)
    clean.columns["data"] += MS * waits
    found = [*slow_ranks(clean), *slow_stages(clean, []), *slow_data(clean), *pauses(clean)]
    assert len(found) <= 1, named(found)


@pytest.mark.parametrize("factor", [1.1, 1.2])
@pytest.mark.parametrize("first", [0, 20])
@pytest.mark.parametrize("ranks", [2, 4])
def test_names_the_slow_rank(factor: float, first: int, ranks: int) -> None:
    wrong = 0
    for seed in range(10):
        slow = table(dp=ranks, seed=seed)
        slow.columns["compute"][1, first:] *= factor
        found = slow_ranks(slow)
        wrong += named(found) != [("slow_compute", (1,))]
        for each in found:
            assert abs(each.first_step - (first + 1)) <= 3
            assert each.last_step == 40
    assert wrong <= (factor < 1.2)


def test_two_slow_ranks_of_one_stage_do_not_hide_each_other() -> None:
    slow = table(dp=4)
    slow.columns["compute"][0] *= 1.2
    slow.columns["compute"][3, 15:] *= 1.3
    assert named(slow_ranks(slow)) == [("slow_compute", (0,)), ("slow_compute", (3,))]


def test_a_rank_that_only_waits_is_not_slow() -> None:
    late = table(dp=4)
    late.columns["step"] *= 1.5
    late.columns["communication"] = late.columns["step"] - late.columns["compute"]
    assert slow_ranks(late) == []


def test_three_percent_are_nobodys_fault() -> None:
    near = table(dp=4, steps=200)
    near.columns["compute"][2] *= 1.03
    assert slow_ranks(near) == []


@pytest.mark.parametrize(
    ("column", "cause"),
    [
        ("run_queue_wait_ns", "host_contention"),
        ("throttled_ns", "host_contention"),
        ("pause", "host_pause"),
        (None, "slow_compute"),
    ],
)
def test_the_hosts_facts_decide_the_cause(column: str | None, cause: str) -> None:
    slow = table(dp=4)
    slow.columns["compute"][1] *= 1.3
    if column is not None:
        slow.columns[column][1] = 0.9 * 30.0 * MS
    assert named(slow_ranks(slow)) == [(cause, (1,))]


def test_a_busy_host_of_all_ranks_explains_none_of_them() -> None:
    slow = table(dp=4)
    slow.columns["compute"][1] *= 1.3
    slow.columns["run_queue_wait_ns"] += 30.0 * MS
    assert named(slow_ranks(slow)) == [("slow_compute", (1,))]


def test_more_work_at_the_others_speed_is_uneven_work() -> None:
    uneven = table(dp=4)
    uneven.columns["work"][:] = 1000.0
    uneven.columns["work"][2] = 1300.0
    uneven.columns["compute"][2] *= 1.28
    assert named(slow_ranks(uneven)) == [("uneven_work", (2,))]


def test_amounts_of_work_that_vary_hide_no_slow_rank() -> None:
    packed = table(dp=4, deviation=0.01)
    tokens = np.random.default_rng(5).uniform(0.7, 1.3, packed.columns["compute"].shape)
    packed.columns["work"][:] = 1000.0 * tokens
    packed.columns["compute"] *= tokens
    assert slow_ranks(packed) == []
    packed.columns["compute"][1] *= 1.2
    assert named(slow_ranks(packed)) == [("slow_compute", (1,))]


def test_a_replica_with_more_tokens_is_one_matter() -> None:
    uneven = table(dp=2, tp=2)
    uneven.columns["work"][:] = 1000.0
    uneven.columns["work"][2:] = 1300.0
    uneven.columns["compute"][2:] *= 1.3
    assert named(slow_ranks(uneven)) == [("uneven_work", (2, 3))]


def test_each_stretch_of_more_work_of_one_rank_is_found() -> None:
    uneven = table(dp=4, steps=80, deviation=0.01)
    uneven.columns["work"][:] = 1000.0
    for stretch in (slice(9, 20), slice(39, 60)):
        uneven.columns["work"][2, stretch] = 1300.0
        uneven.columns["compute"][2, stretch] *= 1.3
    found = slow_ranks(uneven)
    assert named(found) == [("uneven_work", (2,))] * 2
    assert sorted((each.first_step, each.last_step) for each in found) == [(10, 20), (40, 60)]
    (one,) = merged(found)
    assert one.details["stretches"] == [[10, 20], [40, 60]]


def test_rows_for_experts_are_one_ranks_and_the_usual_amount_is_nobodys() -> None:
    run = table(dp=2, tp=2)
    run.columns["work"][:] = 4096.0
    run.columns["expert_work"][:] = np.array([0.8, 1.0, 1.3, 1.0])[:, None] * 1000.0
    run.columns["compute"] *= np.array([0.9, 1.0, 1.15, 1.0])[:, None]
    assert named(slow_ranks(run)) == [("uneven_work", (2,))]


def test_a_stage_without_peers_is_judged_by_its_past() -> None:
    slow = table(dp=1, pp=3)
    slow.columns["compute"][2] *= 1.4
    assert named(slow_stages(slow, [])) == [], "a head may take any time"
    slow.columns["compute"][1, 20:] *= 1.2
    (found,) = slow_stages(slow, [])
    assert found.cause == "slow_compute" and found.ranks == (1,)
    assert abs(found.first_step - 21) <= 2


@pytest.mark.parametrize(
    ("layers", "head", "found"),
    [
        ((None,) * 4, None, [("slow_compute", (0,))]),
        ((2, 2, 2, 2), 3, [("slow_compute", (0,))]),
        ((4, 2, 2, 2), 3, []),
        ((2, 2, 2, 2), 0, []),
    ],
    ids=["not said", "as many", "more layers", "the head, as in a V"],
)
def test_stages_are_compared_with_those_that_have_as_much_to_do(
    layers: tuple[int | None, ...], head: int | None, found: list[Any]
) -> None:
    run = table(dp=1, pp=4)
    run.columns["compute"][0] *= 1.6
    places = {
        rank: replace(place, layers=layers[rank], has_head=None if head is None else rank == head)
        for rank, place in run.places.items()
    }
    assert named(slow_stages(replace(run, places=places), [])) == found


def test_peers_with_less_to_do_were_not_slow_before() -> None:
    run = table(dp=2, pp=3)
    run.columns["compute"][5, 20:] *= 0.8
    run.columns["compute"][4, 20:] *= 1.2
    slow = Finding(
        cause="uneven_work",
        lateness="late_arrival",
        ranks=(4,),
        first_step=21,
        last_step=40,
        lost_fraction=0.1,
        confidence=0.9,
    )
    assert slow_stages(run, [slow]) == []
    assert slow_stages(run, [replace(slow, cause="slow_compute")]) != []


def test_more_work_for_every_stage_is_no_fault() -> None:
    longer = table(dp=1, pp=3)
    longer.columns["compute"][:, 20:] *= 1.5
    assert slow_stages(longer, []) == []


def test_slow_data_constantly_or_again_and_again() -> None:
    waits = table(dp=4)
    waits.columns["data"][:] = 1.0 * MS
    assert slow_data(waits) == []
    waits.columns["data"][3] = 30.0 * MS
    assert named(slow_data(waits)) == [("slow_data", (3,))]
    waits.columns["data"][3] = 1.0 * MS
    waits.columns["data"][3, ::5] = 80.0 * MS
    assert named(slow_data(waits)) == [("slow_data", (3,))]


def test_data_that_all_wait_for_is_one_finding() -> None:
    waits = table(dp=1, tp=1, pp=1)
    waits.columns["data"][:] = 60.0 * MS
    (found,) = slow_data(waits)
    assert found.ranks == (0,) and found.confidence < 0.8


def test_slow_checkpoints_need_two_or_a_flagrant_one() -> None:
    saves = table(dp=4)
    saves.columns["checkpoint"][:, 9::10] = 500.0 * MS
    assert slow_checkpoints(saves) == []
    saves.columns["checkpoint"][1, 9] = 800.0 * MS
    assert slow_checkpoints(saves) == [], "one of four"
    saves.columns["checkpoint"][1, 9::10] = 1000.0 * MS
    assert named(slow_checkpoints(saves)) == [("slow_checkpoint", (1,))]


def test_stops_are_told_once_for_long_or_when_they_come_back() -> None:
    stops = table(dp=4)
    stops.columns["pause"][2, 7] = stops.columns["longest_pause"][2, 7] = 60.0 * MS
    assert pauses(stops) == [], "one short stop"
    stops.columns["pause"][2, 7::4] = stops.columns["longest_pause"][2, 7::4] = 60.0 * MS
    assert pauses(stops) == [], "the recorder stood still, but nothing took longer"
    stops.columns["step"][:, 7::4] += 60.0 * MS
    assert named(pauses(stops)) == [("host_pause", (2,))]
    later = table(dp=4)
    later.columns["pause"][2, 21::4] = later.columns["longest_pause"][2, 21::4] = 60.0 * MS
    later.columns["step"][:, 20:] += 60.0 * MS
    assert pauses(later) == [], "all steps became longer, those with stops no more than others"
    once = table(dp=4)
    once.columns["pause"][0, 11] = once.columns["longest_pause"][0, 11] = 900.0 * MS
    (found,) = pauses(once)
    assert found.ranks == (0,) and (found.first_step, found.last_step) == (12, 12)


def test_starving_for_a_processor_is_no_stop() -> None:
    starved = table(dp=4)
    starved.columns["pause"][2, ::3] = starved.columns["longest_pause"][2, ::3] = 60.0 * MS
    starved.columns["run_queue_wait_ns"][2, ::3] = 55.0 * MS
    assert pauses(starved) == []
