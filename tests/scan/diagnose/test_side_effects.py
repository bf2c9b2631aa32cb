"""A link that only exits tell of is not blamed for what another fault makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mt_megatron.scan.analysis.units import SlowUnit
from mt_megatron.scan.diagnose.hops.side_effects import without_side_effects
from mt_megatron.scan.findings.finding import Finding

from .test_starved import slow


def hidden(first: int, last: int, *, by_past: bool, pair: tuple[int, int] = (4, 6)) -> SlowUnit:
    return replace(slow(by_past=by_past, first=first), last_step=last, pair=pair, certainty=None)


def late(rank: int, first: int) -> Finding:
    return Finding(
        cause="slow_compute",
        lateness="late_arrival",
        ranks=(rank,),
        first_step=first,
        last_step=40,
        lost_fraction=0.1,
        confidence=0.95,
        evidence=(),
    )


@pytest.mark.parametrize("unit", [hidden(19, 40, by_past=True), hidden(1, 18, by_past=True)])
def test_steps_before_and_after_another_fault_are_no_comparison(unit: SlowUnit) -> None:
    assert without_side_effects([unit], [late(9, 19)]) == []
    certain = replace(slow(by_past=False, first=19), certainty=15.0)
    assert without_side_effects([unit, certain], []) == [certain]


def test_who_comes_late_leaves_late() -> None:
    assert without_side_effects([hidden(1, 40, by_past=False)], [late(6, 25)]) == []


def test_another_link_in_other_steps_or_beside_others_stays() -> None:
    units = [hidden(30, 40, by_past=True), hidden(19, 40, by_past=False)]
    assert without_side_effects(units, [late(9, 19)]) == units


def test_little_beside_another_fault_is_no_second_one() -> None:
    little = replace(hidden(30, 40, by_past=True), ratio=1.2)
    assert without_side_effects([little], []) == [little]
    assert without_side_effects([little], [late(9, 19)]) == []


def test_a_group_whose_whole_times_are_slow_stays() -> None:
    certain = replace(hidden(19, 40, by_past=True), certainty=9.0)
    assert without_side_effects([certain], [late(6, 19)]) == [certain]
