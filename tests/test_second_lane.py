"""The table of moved tests names tests that exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import UNKNOWN
from tests.second_lane import DAILY, MOVED, is_moved, lines_of_lane, of_lane, unknown

ROOT = Path(__file__).resolve().parent.parent


def test_every_entry_is_the_beginning_of_a_test(pytestconfig: pytest.Config) -> None:
    """Of the files that are collected beside this one: all of them where the whole lane runs."""
    assert pytestconfig.stash[UNKNOWN] == []
    assert not [file for file in MOVED if not (ROOT / file).is_file()]


def test_an_entry_that_no_test_begins_with_is_noticed() -> None:
    file, beginnings = next(iter(MOVED.items()))
    found = [f"{file}::{beginning}" for beginning in beginnings]
    assert unknown(found) == []
    assert unknown([f"{file}::test_another"]) == found


def test_volumes_are_those_of_the_lane_that_runs(pytestconfig: pytest.Config) -> None:
    """In this process as in ranks, which read the variable that options set."""
    assert bool(pytestconfig.getoption("--all") or pytestconfig.getoption("--soak")) == DAILY


@pytest.mark.parametrize(
    ("option", "daily", "soak"), [("--all", True, False), ("--soak", True, True), ("-q", False, False)]
)
def test_options_are_heard_before_tables_of_cases_are_read(option: str, daily: bool, soak: bool) -> None:
    """The conftest of a folder that is named imports tables of cases before options are parsed."""
    program = (
        "import sys, pytest\n"
        "pytest.main([sys.argv[1], '--collect-only', '-q', 'tests/planning/test_balance.py'])\n"
        "import os, tests.second_lane\n"
        "print(tests.second_lane.DAILY, os.environ.get('MT_MEGATRON_SOAK') == '1')\n"
    )
    unset = {key: value for key, value in os.environ.items() if not key.startswith("MT_MEGATRON_")}
    run = subprocess.run(
        [sys.executable, "-c", program, option],
        cwd=ROOT,
        env=unset,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.stdout.splitlines()[-1] == f"{daily} {soak}", run.stdout[-1000:] + run.stderr[-1000:]


def test_a_case_that_no_table_has_is_an_error() -> None:
    with pytest.raises(KeyError):
        of_lane({"a": 1}, "b")
    with pytest.raises(KeyError):
        lines_of_lane(["--bf16"], "")


def test_a_parameter_is_moved_without_its_siblings() -> None:
    moved = "tests/session/test_order.py::test_data_loader_workers[spawn-False]"
    assert is_moved(moved) and not is_moved(moved.replace("spawn-False", "fork-True"))
    assert not is_moved("tests/session/test_order.py::test_patch_changes_something")
