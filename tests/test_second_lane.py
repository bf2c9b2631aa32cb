"""The table of moved tests names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.second_lane import MOVED, is_moved, lines_of_lane, of_lane

ROOT = Path(__file__).resolve().parent.parent


def test_every_entry_is_the_beginning_of_a_test() -> None:
    missing = []
    for file, beginnings in MOVED.items():
        names = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), flags=re.MULTILINE)
        for beginning in beginnings:
            name, parametrized, _ = beginning.partition("[")
            if not any(each == name if parametrized else each.startswith(name) for each in names):
                missing.append(f"{file}::{beginning}")
    assert not missing


def test_a_case_that_no_table_has_is_an_error() -> None:
    with pytest.raises(KeyError):
        of_lane({"a": 1}, "b")
    with pytest.raises(KeyError):
        lines_of_lane(["--bf16"], "")


def test_a_parameter_is_moved_without_its_siblings() -> None:
    moved = "tests/session/test_order.py::test_data_loader_workers[spawn-False]"
    assert is_moved(moved) and not is_moved(moved.replace("spawn-False", "fork-True"))
    assert not is_moved("tests/session/test_order.py::test_patch_changes_something")
