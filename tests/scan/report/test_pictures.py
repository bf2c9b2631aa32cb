"""Pictures of the report: axes begin at 0 with round figures, and a phone gets pictures of its own size."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mt_megatron.scan.report.charts import NARROW, WIDE, cut_off, round_step, step_times
from mt_megatron.scan.report.data import Bar, Excerpt, Row, StepTimes
from mt_megatron.scan.report.excerpt import title_for
from mt_megatron.scan.report.html import page

from .test_report import finding, wide


def lengths(*seconds: float) -> StepTimes:
    return StepTimes(steps=tuple(range(1, len(seconds) + 1)), seconds=seconds)


@pytest.mark.parametrize(
    ("seconds", "names"),
    [
        ((0.394, 0.427, 0.460, 0.493), ["0", "200 ms", "400 ms", "600 ms"]),
        ((1.9, 2.1, 2.0), ["0", "1 s", "2 s", "3 s"]),
        ((1e-3, 1.1e-3), ["0", "500 us", "1 ms", "1.5 ms"]),
    ],
)
def test_the_axis_of_step_times_begins_at_0_with_round_figures(
    seconds: tuple[float, ...], names: list[str]
) -> None:
    picture = step_times(wide((2, 1, 1), step_times=lengths(*seconds)))
    assert re.findall(r'text-anchor="end">([^<]+)<', picture) == names


def test_steps_beyond_the_picture_are_counted() -> None:
    long = wide((2, 1, 1), step_times=lengths(*[0.1] * 20, 5.0, 7.0))
    assert cut_off(long) == 2 and "2 steps are longer than the picture is high" in page(long)
    assert "longer than the picture" not in page(wide((2, 1, 1), step_times=lengths(*[0.1] * 20)))


def test_every_wide_picture_has_one_for_phones_with_as_large_letters() -> None:
    row = Row(rank=0, culprit=True, bars=(Bar(begin=0, end=900, kind="forward", text="forward"),))
    shown = Excerpt(title="A usual step", step=3, length=1000, rows=(row,))
    text = page(wide((2, 1, 1), step_times=lengths(*[0.1] * 20), excerpts=(shown,)))
    pictures = re.findall(r'<div class="(wide|narrow)"><svg viewBox="0 0 (\d+) \d+" width="(\d+)"', text)
    # One unit of the picture is one pixel of the screen, so letters of 12 stay 12 pixels high.
    expected = [("wide", str(WIDE), str(WIDE)), ("narrow", str(NARROW), str(NARROW))]
    assert pictures == expected * 2 and NARROW < 390
    assert re.search(r"max-width:760px\)\{.*\.wide\{display:none\}\.narrow\{display:block\}", text, re.DOTALL)


def test_headings_of_the_same_ranks_differ_by_cause() -> None:
    slow, waiting = finding(), finding(cause="slow_data")
    titles = [title_for(each, "Step 5, with it", True) for each in (slow, waiting)]
    assert titles == ["Rank 1, slow compute: step 5, with it", "Rank 1, slow data: step 5, with it"]
    everybody = replace(slow, ranks=(), details={"whole_run": True})
    assert title_for(everybody, "Step 5", True).startswith("The whole run, ")


def test_round_steps() -> None:
    assert [round_step(each) for each in (1, 1.1, 3, 7, 20, 21)] == [1, 2, 5, 10, 20, 50]


def test_words_that_only_insiders_know_are_not_in_the_report() -> None:
    text = page(wide((2, 1, 1), step_times=lengths(*[0.1] * 20)))
    assert "exposed communication" not in text and "standard errors" not in text
