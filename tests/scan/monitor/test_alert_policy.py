"""What is told while a run is judged again and again: each onset once, chance never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mt_megatron.scan.findings.finding import Finding
from mt_megatron.scan.monitor.alert_policy import OVER, RECENT, Telling


def finding(cause: Any, *ranks: int, steps: tuple[int, int], sure: float = 0.8, **details: Any) -> Finding:
    return Finding(
        cause=cause,
        lateness="late_arrival",
        ranks=ranks,
        first_step=steps[0],
        last_step=steps[1],
        lost_fraction=0.2,
        confidence=sure,
        details=details,
    )


def test_what_one_look_sees_is_chance_unless_it_is_beyond_doubt() -> None:
    telling = Telling()
    slow = finding("slow_compute", 1, steps=(10, 14))
    assert telling.news([slow], step=14, sure=False) == []
    assert telling.news([], step=15, sure=False) == []
    assert telling.news([slow], step=16, sure=False) == [], "not twice in a row"
    assert telling.news([slow], step=17, sure=False) == [slow]
    assert telling.news([slow], step=18, sure=False) == [], "told"
    plain = finding("slow_compute", 2, steps=(10, 18), sure=0.95)
    assert telling.news([plain], step=18, sure=False) == [plain]
    assert telling.news([finding("slow_data", 3, steps=(10, 18))], step=18, sure=True) != []


def test_a_new_onset_of_the_same_cause_is_told_anew_and_another_rank_is_another() -> None:
    telling = Telling()
    first = finding("slow_link", 0, 1, steps=(10, 16), sure=0.95)
    assert telling.news([first], step=16, sure=False) == [first]
    longer = replace(first, last_step=20)
    assert telling.news([longer], step=20, sure=False) == []
    back = finding("slow_link", 0, 1, steps=(10, 40), sure=0.95, since=36)
    assert telling.news([back], step=40, sure=False) == [back]
    assert telling.news([back], step=41, sure=False) == []
    other = finding("slow_link", 1, 2, steps=(36, 41), sure=0.95)
    assert telling.news([back, other], step=41, sure=False) == [other]


def test_history_alerts_nobody() -> None:
    telling = Telling()
    old = finding("slow_compute", 1, steps=(10, 20), sure=0.95)
    assert telling.news([old], step=20 + RECENT + 1, sure=False) == []
    assert telling.news([old], step=20 + RECENT, sure=False) == [old]


def test_steps_of_what_is_over_are_left_out_once_it_is_over() -> None:
    telling = Telling()
    slow = finding("slow_compute", 1, steps=(10, 16), sure=0.95)
    telling.news([slow], step=16, sure=False)
    assert telling.over(16) == []
    telling.news([replace(slow, last_step=18)], step=18, sure=False)
    assert telling.over(18 + OVER) == []
    assert telling.over(18 + OVER + 1) == [(9, 19)]


def test_what_is_unknown_or_unsure_is_not_told() -> None:
    telling = Telling()
    doubtful = [finding("unknown", 1, steps=(1, 9)), finding("slow_link", 0, 1, steps=(1, 9), sure=0.55)]
    assert telling.news(doubtful, step=9, sure=True) == []


def test_a_hang_is_told_once_and_who_waited_in_it_is_no_other() -> None:
    telling = Telling()
    hang = finding("hang", 2, steps=(7, 7), seq=3)
    assert telling.hang(hang) == [hang] and telling.hang(hang) == []
    assert telling.hang(finding("hang", 1, steps=(7, 7), seq=2)) == []
    later = replace(hang, first_step=9, details={"seq": 8})
    assert telling.hang(later) == [later]


def test_trifles_wake_nobody() -> None:
    telling = Telling()
    cheap = replace(finding("slow_link", 0, 1, steps=(5, 9), sure=0.95), lost_fraction=0.01)
    collected = finding("host_pause", 1, steps=(9, 9), sure=0.95, longest_ms=250.0)
    assert telling.news([cheap, collected], step=9, sure=True) == []
    rare = replace(cheap, cause="slow_checkpoint", ranks=(1,))
    long = replace(collected, details={"longest_ms": 1500.0})
    assert telling.news([rare, long], step=9, sure=True) == [rare, long]
