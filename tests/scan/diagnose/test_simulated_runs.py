"""The diagnosis on simulated runs whose labels it does not see, and how it is judged there.

The whole measurement is ``benchmarks/scan/scan_diagnosis.py``; here a few small runs of each kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mt_megatron.scan.diagnose.run import diagnose
from mt_megatron.scan.findings.finding import Finding
from tests.second_lane import DAILY
from tools.scan_simulator import Job, Layout, parse_fault, simulate
from tools.scan_simulator.scores import Verdict, claims, confusion, f1_by_cause, fits, has_place, judged
from tools.scan_simulator.trials import SINGLE, STEPS, Trial, clean, double, single

LAYOUT = Layout(dp=2, tp=2, pp=2, ranks_per_node=4)


def finding(cause: Any, *ranks: int, confidence: float = 0.9, **more: Any) -> Finding:
    return Finding(
        cause=cause,
        lateness="late_arrival",
        ranks=ranks,
        first_step=1,
        last_step=9,
        lost_fraction=more.pop("lost_fraction", 0.1),
        confidence=confidence,
        **more,
    )


def verdict(fault: str, *findings: Finding, layout: Layout = LAYOUT) -> Verdict:
    return judged("any", 0, findings, [parse_fault(fault)] if fault else [], layout)


# -- how it is judged


def test_right_place_and_cause_are_found_and_nothing_else_is() -> None:
    fault = "slow_compute:rank=3,factor=1.2"
    assert verdict(fault, finding("slow_compute", 3)).found == (True,)
    assert not verdict(fault, finding("slow_compute", 3)).wrong
    elsewhere = verdict(fault, finding("slow_compute", 2))
    assert elsewhere.placed == elsewhere.found == (False,)
    assert (elsewhere.wrong_place, elsewhere.wrong_cause) == (1, 0)
    other = verdict(fault, finding("host_contention", 3))
    assert other.placed == (True,) and other.found == (False,)
    assert (other.wrong_place, other.wrong_cause) == (0, 1)
    assert verdict(fault, finding("slow_compute", 2, 3)).wrong


def test_saying_nothing_is_a_miss_and_not_wrong() -> None:
    for said in ((), (finding("unknown", 1),), (finding("slow_compute", 1, confidence=0.4),)):
        made = verdict("slow_compute:rank=3,factor=1.2", *said)
        assert made.found == (False,) and not made.wrong and made.claims == 0 and made.named == "unknown"


def test_a_right_answer_does_not_excuse_a_wrong_one() -> None:
    made = verdict("slow_compute:rank=3,factor=1.2", finding("slow_compute", 3), finding("slow_compute", 1))
    assert made.found == (True,) and made.wrong


def test_a_link_is_both_its_ends_and_called_a_link() -> None:
    fault = "slow_link:ranks=0-1,latency_ms=5"
    assert verdict(fault, finding("slow_link", 1, 0)).found == (True,)
    assert verdict(fault, finding("slow_link", 0, 2)).wrong
    assert verdict(fault, finding("slow_group", 0, 1)).wrong
    assert verdict(fault, finding("slow_link", 0)).wrong


def test_a_group_of_two_may_be_called_a_link() -> None:
    two, four = parse_fault("slow_group:group=tp,rank=0,latency_ms=5"), Layout(tp=4)
    assert fits(finding("slow_link", 0, 1), two, LAYOUT) and fits(finding("slow_group", 0, 1), two, LAYOUT)
    assert fits(finding("slow_group", 0, 1, 2, 3), two, four)
    assert not fits(finding("slow_link", 0, 1), two, four)


def test_a_machine_is_named_by_its_ranks_or_its_name() -> None:
    fault = parse_fault("slow_node_link:host=1,latency_ms=5")
    three = Layout(dp=3, tp=4, ranks_per_node=4)
    assert has_place(finding("slow_node_link", 4, 5, 6, 7), fault, three)
    assert has_place(finding("slow_node_link", host="node001"), fault, three)
    assert not has_place(finding("slow_node_link", host="node000"), fault, three)
    # Of two machines each is behind the same border.
    assert has_place(finding("slow_node_link", host="node000"), fault, LAYOUT)


def test_uneven_work_of_a_replica_is_any_of_its_ranks() -> None:
    fault = parse_fault("uneven_work:rank=2,factor=1.5")
    assert fault.culprits(LAYOUT) == (2, 3, 6, 7)
    assert fits(finding("uneven_work", 2, 3, 6, 7), fault, LAYOUT)
    assert fits(finding("uneven_work", 6), fault, LAYOUT)
    assert not fits(finding("uneven_work", 0), fault, LAYOUT)


def test_each_claim_in_a_clean_run_is_an_alert() -> None:
    made = verdict(
        "", finding("slow_compute", 1), finding("unknown", 2), finding("slow_data", 2, confidence=0.3)
    )
    assert made.claims == 1 and made.wrong


def test_the_surest_claim_names_the_cause() -> None:
    sure, unsure = finding("slow_data", 1), finding("slow_compute", 1, confidence=0.6)
    assert claims([unsure, sure]) == [sure, unsure]
    same = finding("slow_link", 0, 1, lost_fraction=0.5)
    assert claims([sure, same])[0] == same


def test_f1_counts_misses_and_mistakes() -> None:
    fault, other = "slow_compute:rank=3,factor=1.2", "slow_data:rank=3,factor=4"
    made = [
        verdict(fault, finding("slow_compute", 3)),
        verdict(fault),
        verdict(other, finding("slow_compute", 3)),
        verdict(other, finding("slow_data", 3)),
    ]
    assert confusion(made)["slow_data"] == {"slow_compute": 1, "slow_data": 1}
    # slow_compute: one right of two true and two named; slow_data: one right of two true and one named.
    assert f1_by_cause(made) == pytest.approx({"slow_compute": 0.5, "slow_data": 2 / 3})


# -- what is drawn


@pytest.mark.parametrize("category", SINGLE)
def test_drawn_faults_fit_their_jobs_and_repeat(category: str) -> None:
    for seed in range(20 if DAILY else 4):
        trial = single(category, seed)
        assert trial == single(category, seed)
        (fault,) = trial.faults
        fault.check(trial.job.layout, trial.job.steps)
        assert trial.job.steps == STEPS and fault.first <= STEPS - 15
        if category.startswith("link"):
            kind = category.split()[1]
            assert {kind, f"{kind}-cp"} & {*fault.groups(trial.job.layout)}


def test_two_at_once_are_apart() -> None:
    for seed in range(20 if DAILY else 4):
        first, second = double(seed).faults
        layout = double(seed).job.layout
        assert not {*first.culprits(layout)} & {*second.culprits(layout)}


def test_what_a_fault_costs_is_seen_beside_the_run_without_it(tmp_path: Path) -> None:
    slow = parse_fault("slow_compute:rank=1,factor=1.5,first=3")
    job = Job(layout=Layout(tp=2), steps=8, microbatches=4)
    for faults, least, most in (((slow,), 0.25, 0.35), ((), 0.0, 0.0)):
        truth = simulate(tmp_path / str(len(faults)), job, faults, seed=1)
        trial = Trial(category="any", job=job, faults=faults, seed=1)
        assert least <= trial.lost_fraction(truth.step_seconds) <= most


# -- the diagnosis


FAULTS = (
    "slow_compute:rank=3,factor=1.2,first=15",
    "slow_compute:rank=6,factor=1.2",
    "slow_link:ranks=1-5,latency_ms=5,first=15",
    "slow_link:ranks=2-3,bandwidth=0.25",
    "slow_link:ranks=0-2,latency_ms=5,first=15",
    "host_contention:rank=2,share=0.4,first=15",
    "host_pause:rank=1,seconds=0.5,first=15",
    "slow_data:rank=4,factor=9,first=15",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_found_and_no_other_claimed(fault: str, tmp_path: Path) -> None:
    made = _diagnosed(tmp_path, LAYOUT, fault)
    assert made.found == (True,) and not made.wrong, made.said


ONE_RING = Layout(dp=8, ranks_per_node=4)
"""Across two nodes: its hops are unequal, and there is no second one to compare it with."""


@pytest.mark.parametrize("link", ["1-2", "3-4"])
def test_a_link_of_a_ring_that_nothing_is_like_is_found_though_it_was_always_slow(
    link: str, tmp_path: Path
) -> None:
    made = _diagnosed(tmp_path, ONE_RING, f"slow_link:ranks={link},latency_ms=5")
    assert made.found == (True,) and not made.wrong, made.said


@pytest.mark.parametrize("mode", ["load", "quota"])
@pytest.mark.parametrize("link", [True, False])
def test_a_slow_link_is_told_beside_a_member_that_its_host_hinders(
    mode: str, link: bool, tmp_path: Path
) -> None:
    job = Job(layout=Layout(dp=5, ranks_per_node=8), steps=40)
    faults = [parse_fault(f"host_contention:rank=1,share=0.4,first=16,mode={mode}")]
    if link:
        faults.append(parse_fault("slow_link:ranks=3-4,bandwidth=0.25,first=16"))
    simulate(tmp_path / "run", job, faults, seed=23)
    found = {each.ranks: each.cause for each in diagnose(tmp_path / "run").findings}
    assert found == {(1,): "host_contention", **({(3, 4): "slow_link"} if link else {})}


@pytest.mark.parametrize("layout", [LAYOUT, ONE_RING])
def test_nothing_is_claimed_of_a_clean_run(layout: Layout, tmp_path: Path) -> None:
    made = _diagnosed(tmp_path, layout)
    assert made.claims == 0, made.said


def test_a_clean_draw_has_the_length_asked_for() -> None:
    assert clean(3, 77).job.steps == 77 and clean(3, 77).faults == ()


def _diagnosed(folder: Path, layout: Layout, *texts: str) -> Verdict:
    faults = [parse_fault(text) for text in texts]
    simulate(folder / "run", Job(layout=layout, steps=40, microbatches=6), faults, seed=11)
    return judged("any", 11, diagnose(folder / "run").findings, faults, layout)
