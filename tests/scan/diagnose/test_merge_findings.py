"""One matter is told once, with what it really costs; a quota is told from a process that stood still."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mt_megatron.scan.diagnose.late_arrival.quota import short_of_quota
from mt_megatron.scan.diagnose.late_arrival.waits import pauses, slow_data
from mt_megatron.scan.diagnose.merge_findings import merged, one_per_rank, with_true_cost
from mt_megatron.scan.findings.finding import Finding

from .step_tables import MS, table


def finding(cause: Any, *ranks: int, steps: tuple[int, int] = (1, 20), lost: float = 0.1) -> Finding:
    return Finding(
        cause=cause,
        lateness="late_arrival",
        ranks=ranks,
        first_step=steps[0],
        last_step=steps[1],
        lost_fraction=lost,
        confidence=0.9,
        evidence=(f"steps {steps}",),
    )


def test_the_same_cause_of_a_rank_in_two_stretches_is_one_finding() -> None:
    early, late = finding("slow_compute", 3, steps=(1, 10)), finding("slow_compute", 3, steps=(21, 30))
    (one,) = merged([early, late])
    assert (one.first_step, one.last_step) == (1, 30) and len(one.evidence) == 2
    assert abs(one.lost_fraction - 0.1 * 20 / 30) < 1e-9
    others = [finding("slow_compute", 2), finding("slow_data", 3), replace(early, cause="uneven_work")]
    assert len(merged([early, *others])) == 4


def test_stops_beside_a_quota_are_the_quotas() -> None:
    quota, stops = finding("host_contention", 1), finding("host_pause", 1, steps=(5, 15))
    assert one_per_rank([quota, stops]) == [quota]
    later = finding("host_pause", 1, steps=(30, 40))
    assert one_per_rank([quota, later, finding("host_pause", 2)])[1:] == [later, finding("host_pause", 2)]


def test_what_slack_hides_costs_nothing() -> None:
    run = table(dp=4)
    slow = finding("slow_compute", 2, steps=(21, 40), lost=0.2)
    (hidden,) = with_true_cost([slow], run)
    assert hidden.lost_fraction == 0.0 and hidden.details["own"] == 0.2
    run.columns["step"][:, 20:] *= 1.1
    (half,) = with_true_cost([slow], run)
    assert abs(half.lost_fraction - 0.1 / 1.1) < 1e-6
    run.columns["step"][:, 20:] *= 2.0
    assert with_true_cost([slow], run) == [slow], "somebody else's share is not its"
    always = finding("slow_compute", 2, steps=(1, 40), lost=0.2)
    assert with_true_cost([always], run) == [always], "nothing to compare with"


def test_a_quota_that_strikes_now_and_then_is_told_by_its_counter() -> None:
    run = table(dp=4, deviation=0.01)
    struck = np.arange(20, 40)[::2]
    run.columns["throttled_ns"][1, struck] = 15.0 * MS
    run.columns["pause"][1, struck] = run.columns["longest_pause"][1, struck] = 25.0 * MS
    assert short_of_quota(run) == [], "it stopped nothing that took longer"
    run.columns["compute"][1, struck] += 15.0 * MS
    run.columns["step"][:, struck] += 15.0 * MS
    (found,) = short_of_quota(run)
    assert (found.cause, found.ranks) == ("host_contention", (1,)) and 20 <= found.first_step <= 22
    told = one_per_rank([found, *pauses(run)])
    assert told == [found]


def test_a_quota_of_all_ranks_is_nobodys() -> None:
    run = table(dp=4)
    run.columns["throttled_ns"][:] = 20.0 * MS
    assert short_of_quota(run) == []


def test_nobody_waits_for_data_that_lie_in_the_queue() -> None:
    run = table(dp=4)
    run.columns["data"][:] = 1.0 * MS
    run.columns["data"][3] = 15.0 * MS
    run.columns["data_queue_depth"][3] = 3.6
    assert slow_data(run) == []
    run.columns["data"][3] = 80.0 * MS
    assert [each.ranks for each in slow_data(run)] == [(3,)], "it ran dry between the samples"
    run.columns["data"][3] = 15.0 * MS
    run.columns["data_queue_depth"][3] = 0.2
    assert [each.ranks for each in slow_data(run)] == [(3,)]
