"""The gate is open, and it shuts for each thing that must shut it."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.coverage_gate.gate import GateError, judge, read_unreachable
from tests.coverage_gate.points import Point, installed_root, list_points
from tests.coverage_gate.runs import Run

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the tracer reads CPython 3.11 bytecode positions"
)


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return list_points(installed_root())


@pytest.mark.daily
def test_every_touch_point_is_executed_or_unreachable_with_a_reason(
    gate_run: Run, points: list[Point], capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = judge(points, gate_run.records, read_unreachable(), gate_run.patches)
    with capsys.disabled():
        print("\n" + verdict.summary())
    verdict.require()
    assert len(verdict.executed) + len(verdict.unreachable) == sum(not p.set_aside for p in points)


@pytest.mark.daily
def test_removing_the_record_of_one_test_names_its_points(gate_run: Run, points: list[Point]) -> None:
    """Negative control, once for every test that alone executes some point."""
    executed = judge(points, gate_run.records, read_unreachable(), gate_run.patches).executed
    alone: dict[str, list[str]] = {}
    for key, tests in executed.items():
        if len(tests) == 1:
            alone.setdefault(tests[0], []).append(key)
    assert len(alone) > 20
    where = {point.key: point.where for point in points}
    for test, keys in alone.items():
        rest = {name: found for name, found in gate_run.records.items() if name != test}
        with pytest.raises(GateError) as caught:
            judge(points, rest, read_unreachable(), gate_run.patches).require()
        text = str(caught.value)
        assert text.count("not executed by any named test") == len(keys), test
        for key in keys:
            assert where[key] in text


@pytest.mark.daily
def test_a_touch_point_added_to_a_copied_tree_is_found(gate_run: Run, tmp_path: Path) -> None:
    """Negative control: lines move and nothing but the new points is to blame."""
    root = tmp_path / "core"
    shutil.copytree(installed_root(), root, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    timers = root / "timers.py"
    source = timers.read_text(encoding="utf-8")
    changed = "# A line that shifts every other one.\n\n" + source.replace(
        "        self._elapsed += elapsed\n",
        "        self._elapsed += elapsed\n        torch.zeros(1, device='cuda:1').to('cuda')\n",
    )
    assert changed.count("cuda:1") == 1
    timers.write_text(changed, encoding="utf-8")
    verdict = judge(list_points(root), gate_run.records, read_unreachable(), gate_run.patches)
    assert len(verdict.problems) == 3, verdict.problems
    for expected in ("'cuda:1'", "'cuda'", "torch.zeros(1, device='cuda:1').to('cuda')"):
        assert any(line.split("\n")[0].endswith(expected) for line in verdict.problems), expected
    assert all("timers.py" in line and "Timer.stop" in line for line in verdict.problems)


@pytest.mark.daily
def test_a_stale_entry_and_a_reachable_entry_shut_the_gate(gate_run: Run, points: list[Point]) -> None:
    unreachable = read_unreachable()
    key, entry = next(iter(unreachable.items()))
    stale = {**unreachable, key + "0": entry}
    with pytest.raises(GateError, match="stale entry.*" + key.split()[0]):
        judge(points, gate_run.records, stale, gate_run.patches).require()
    executed = next(iter(judge(points, gate_run.records, unreachable, gate_run.patches).executed))
    with pytest.raises(GateError, match="listed as unreachable, but executed by"):
        judge(points, gate_run.records, {**unreachable, executed: entry}, gate_run.patches).require()


@pytest.mark.daily
def test_a_point_said_to_be_replaced_by_a_patch_needs_that_patch(gate_run: Run, points: list[Point]) -> None:
    unreachable = read_unreachable()
    key, entry = next((k, e) for k, e in unreachable.items() if e.patch)
    with pytest.raises(GateError, match="is not applied"):
        judge(points, gate_run.records, unreachable, gate_run.patches - {entry.patch}).require()
    renamed = {**unreachable, key: replace(entry, patch="no.such_patch")}
    with pytest.raises(GateError, match="no.such_patch"):
        judge(points, gate_run.records, renamed, gate_run.patches).require()


@pytest.mark.daily
def test_a_change_of_the_statement_makes_its_entries_stale(gate_run: Run, points: list[Point]) -> None:
    """A digest covers the statement around the point, so an entry cannot outlive a rewrite."""
    unreachable = read_unreachable()
    key = next(iter(unreachable))
    moved = [replace(p, digest="00000000") if p.key == key else p for p in points]
    problems = judge(moved, gate_run.records, unreachable, gate_run.patches).problems
    assert any("stale entry" in line and key in line for line in problems)
    assert any("not executed by any named test" in line for line in problems)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[group]]\nfile = "a.py"\npoints = []\n', "has the keys"),
        ('[[group]]\nfile = "a.py"\npoints = []\nreason = "cannot run"\n', "no reason"),
        ('[[group]]\nfile = "a.py"\npoints = ["f 1", "f 1"]\nreason = "needs a thing we lack"\n', "twice"),
    ],
)
def test_a_malformed_list_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "unreachable.toml"
    path.write_text(text)
    with pytest.raises(GateError, match=message):
        read_unreachable(path)
