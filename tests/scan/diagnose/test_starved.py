"""Who was not running is told from who waited for the wire, and slow work from work that was kept waiting."""

from __future__ import annotations

import numpy as np

from mt_megatron.scan.analysis.matched_ops import Rows, Samples
from mt_megatron.scan.analysis.step_table import StepTable
from mt_megatron.scan.analysis.units import SlowUnit, Unit
from mt_megatron.scan.diagnose.late_arrival.host_work import slow_on_host, starved_on_host
from mt_megatron.scan.diagnose.late_arrival.own_work import slow_ranks
from mt_megatron.scan.diagnose.late_arrival.quota import short_of_quota
from mt_megatron.scan.diagnose.late_arrival.stages import slow_stages
from mt_megatron.scan.diagnose.late_arrival.waits import slow_checkpoints, slow_data
from mt_megatron.scan.diagnose.slow_transfer.slow_units import leaving_out
from mt_megatron.scan.diagnose.slow_transfer.starved import beyond_own_waits, beyond_waits

from .step_tables import MS, table


def edge(steps: int = 40) -> Unit:
    rows = Rows(
        iteration=np.arange(1, steps + 1),
        label=np.zeros(steps, dtype=np.int64),
        count=np.ones(steps, dtype=np.int64),
        time=np.full(steps, 5 * MS),
    )
    samples = Samples(
        iteration=np.arange(1, steps + 1),
        label=np.zeros(steps, dtype=np.int64),
        arrival=np.zeros((steps, 2), dtype=np.float32),
        exit=np.zeros((steps, 2), dtype=np.float32),
    )
    return Unit(
        name="pp", ranks=(0, 1), is_edge=True, crosses=True, rows=rows, samples=samples, clock_error=0.0
    )


def slow(*, by_past: bool, lost: float = 30 * MS, first: int = 21) -> SlowUnit:
    return SlowUnit(
        unit=edge(),
        ratio=2.7,
        confidence=0.97,
        first_step=first,
        last_step=40,
        lost_ns=lost,
        extra_ns=lost,
        healthy_ns=5 * MS,
        by_past=by_past,
    )


def waits(rank: int, *, column: str = "run_queue_wait_ns", size: float = 25 * MS) -> StepTable:
    run = table(dp=4)
    run.columns[column][rank, 20:] = size
    return run


def test_a_transfer_to_who_was_not_running_is_no_slow_link() -> None:
    for by_past in (True, False):
        for column in ("run_queue_wait_ns", "throttled_ns", "pause"):
            for member in (0, 1):
                assert beyond_waits([slow(by_past=by_past)], waits(member, column=column)) == []


def test_a_slow_link_beside_waits_that_do_not_explain_it_stays() -> None:
    for by_past in (True, False):
        link = slow(by_past=by_past)
        assert beyond_waits([link], table(dp=4)) == [link]
        assert beyond_waits([link], waits(3)) == [link], "another rank waited"
        assert beyond_waits([link], waits(0, size=5 * MS)) == [link], "far too short"


def test_what_everybody_always_waits_explains_nothing_but_asks_for_more() -> None:
    busy = table(dp=4)
    busy.columns["run_queue_wait_ns"] += 40 * MS
    for by_past in (True, False):
        link = slow(by_past=by_past, lost=60 * MS)
        assert beyond_waits([link], busy) == [link]
        assert beyond_waits([slow(by_past=by_past, lost=15 * MS)], busy) == [], "may be chance"
    busy.columns["run_queue_wait_ns"][:, 20:] += 50 * MS
    beside_others, than_before = slow(by_past=False, lost=60 * MS), slow(by_past=True, lost=60 * MS)
    assert beyond_waits([beside_others], busy) == [beside_others]
    assert beyond_waits([than_before], busy) == []


def test_who_gets_no_processor_reads_and_writes_slowly_too() -> None:
    for column, find in (("data", slow_data), ("checkpoint", slow_checkpoints)):
        run = table(dp=4)
        run.columns[column][:, 3::4] = 5 * MS
        run.columns[column][2, 23::4] = 400 * MS
        (found,) = find(run)
        assert beyond_own_waits([found], run) == [found]
        run.columns["run_queue_wait_ns"] += 300 * MS
        assert beyond_own_waits([found], run) == [found], "everybody's usual wait"
        run.columns["run_queue_wait_ns"][:, 23::4] += 400 * MS
        assert beyond_own_waits([found], run) == [found], "the others waited as long"
        run.columns["throttled_ns"][2, 23::4] = 1300 * MS
        assert beyond_own_waits([found], run) == []


def on_host(run: StepTable) -> StepTable:
    run.columns["on_host"][:] = 1.0
    run.columns["process_cpu_ns"] = 0.9 * run.columns["compute"].copy()
    return run


def causes(run: StepTable) -> list[tuple[str, tuple[int, ...]]]:
    found = [*slow_ranks(run), *slow_stages(run, [])]
    return sorted({(each.cause, each.ranks) for each in found if each.confidence >= 0.5})


def test_slow_work_on_a_host_uses_more_of_its_processors() -> None:
    run = on_host(table(dp=4))
    run.columns["compute"][2] *= 1.5
    assert causes(run) == [], "it took longer and nothing says why"
    run.columns["run_queue_wait_ns"][2] = 20 * MS
    assert causes(run) == [("host_contention", (2,))]
    run.columns["process_cpu_ns"][2] *= 1.45
    assert causes(run) == [("slow_compute", (2,))]


def test_who_uses_a_little_more_and_waits_far_longer_is_contended() -> None:
    run = on_host(table(dp=1, pp=4))
    run.columns["compute"][1, 20:] *= 5.0
    run.columns["process_cpu_ns"][1, 20:] *= 1.4
    run.columns["run_queue_wait_ns"][1, 20:] = 350 * MS
    assert slow_on_host(run) == [] and causes(run) == [("host_contention", (1,))]
    work = on_host(table(dp=1, pp=4))
    work.columns["compute"][1, 20:] *= 3.0
    work.columns["process_cpu_ns"][1, 20:] *= 2.8
    assert [(each.cause, each.ranks) for each in slow_on_host(work)] == [("slow_compute", (1,))]
    beside = on_host(table(dp=1, pp=4))
    beside.columns["process_cpu_ns"][1, 20:] *= 2.0
    assert slow_on_host(beside) == [], "a thread that nobody waits for"


def test_who_waits_many_times_as_long_as_all_others_is_starved_wherever_that_shows() -> None:
    rng = np.random.default_rng(4)
    run = on_host(table(dp=2, tp=2))
    run.columns["run_queue_wait_ns"] = 100 * MS * np.exp(0.3 * rng.standard_normal((4, 40)))
    assert starved_on_host(run) == []
    run.columns["run_queue_wait_ns"][3, 30:] *= 10.0
    assert starved_on_host(run) == [], "no step became longer"
    run.columns["step"][:, 30:] *= 3.0
    assert [(each.cause, each.ranks) for each in starved_on_host(run)] == [("host_contention", (3,))]
    run.columns["run_queue_wait_ns"][:3, 30:] *= 10.0
    assert starved_on_host(run) == [], "everybody waits"


def test_on_a_device_the_hosts_processors_need_not_be_used_longer() -> None:
    run = on_host(table(dp=4))
    run.columns["on_host"][:] = 0.0
    run.columns["compute"][2] *= 1.5
    assert causes(run) == [("slow_compute", (2,))]


def test_another_stage_that_uses_more_says_nothing_of_why() -> None:
    run = on_host(table(dp=1, pp=3))
    run.columns["process_cpu_ns"][2] *= 3.0
    run.columns["compute"][2, 20:] *= 2.0
    run.columns["run_queue_wait_ns"][2, 20:] = 80 * MS
    assert causes(run) == [("host_contention", (2,))]


def test_a_larger_checkpoint_is_no_slow_disk() -> None:
    for pp, dp in ((1, 4), (4, 1)):
        run = table(dp=dp, pp=pp)
        run.columns["checkpoint"][:, 3::4] = 100 * MS
        run.columns["checkpoint_bytes"][:, 3::4] = 1e6
        run.columns["checkpoint"][1, 3::4] *= 5
        run.columns["checkpoint_bytes"][1, 3::4] *= 5
        assert slow_checkpoints(run) == []
        run.columns["checkpoint"][1, 31::4] *= 6
        (found,) = slow_checkpoints(run)
        assert found.ranks == (1,) and found.first_step == 32


def test_a_stage_that_publishes_the_whole_is_usual_until_it_takes_longer() -> None:
    run = table(dp=1, pp=4)
    run.columns["checkpoint"][:, 3::4] = 100 * MS
    run.columns["checkpoint"][0, 3::4] = 300 * MS
    assert slow_checkpoints(run) == []
    run.columns["checkpoint"][0, 39] = 3000 * MS
    (found,) = slow_checkpoints(run)
    assert found.ranks == (0,) and found.first_step == found.last_step == 40


def test_steps_that_are_left_out_are_in_no_unit() -> None:
    (unit,) = leaving_out([edge()], [(5, 10), (30, 50)])
    assert unit.samples is not None
    for iteration in (unit.rows.iteration, unit.samples.iteration):
        assert iteration.tolist() == [*range(1, 5), *range(11, 30)]
    assert len(unit.rows.time) == 23 and unit.samples.exit.shape == (23, 2)
    assert leaving_out([edge()], [(1, 40)]) == []


def test_short_stops_by_a_quota_are_told_where_own_work_follows_them() -> None:
    rng = np.random.default_rng(3)
    for follows in (True, False):
        run = table(dp=4, steps=60, deviation=0.01)
        stopped = MS * rng.uniform(0.0, 5.0, 60)
        run.columns["throttled_ns"][1] = stopped
        run.columns["compute"][1] += stopped if follows else rng.permutation(stopped)
        found = short_of_quota(run)
        assert [(each.cause, each.ranks) for each in found] == [("host_contention", (1,))] * follows
