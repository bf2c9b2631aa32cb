"""A sidecar process that is stopped, slow or killed: the same training beside it, and a bounded memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.scope.recording.reader import open_recording
from mt_megatron.scope.watch.sender import MOST_QUEUED
from tests.launch import run_ranks
from tests.scope.watch.sidecar_ranks import KINDS

DAILY = os.environ.get("MT_MEGATRON_DAILY") == "1"
STEPS, QUEUE_MIB = (30, MOST_QUEUED / 2**20) if DAILY else (5, 0.5)
"""A smaller queue is full sooner; a step sends about 1.5 MiB."""

ENDED = ("frozen", "slow", "killed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sidecars")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    target = "tests.scope.watch.sidecar_ranks:trained_beside"
    runs: dict[str, Any] = run_ranks(1, target, str(folder), KINDS, STEPS, QUEUE_MIB, timeout=600)[0]
    return runs


@pytest.mark.parametrize("kind", KINDS[1:])
def test_training_is_the_unwatched_one_to_the_bit(found: dict[str, Any], kind: str) -> None:
    assert len(set(found[kind]["losses"])) == STEPS
    assert found[kind]["losses"] == found["unwatched"]["losses"]
    assert found[kind]["bits"] == found["unwatched"]["bits"]


@pytest.mark.parametrize("kind", ENDED)
def test_memory_grows_by_no_more_than_64_mib(found: dict[str, Any], kind: str) -> None:
    # What any watched run takes (buffers of its first steps) is not the sidecar's doing.
    assert found[kind]["growth_mib"] <= 64 + found["good"]["growth_mib"]


def test_nothing_is_dropped_and_nothing_said_where_all_is_taken(found: dict[str, Any], folder: Path) -> None:
    if not DAILY:
        # The small queue may be full for a moment.
        assert found["good"]["dropped"][0] <= found["frozen"]["dropped"][0]
    else:
        assert found["good"]["dropped"] == [0, 0] and found["good"]["lines"] == []
    with open_recording(folder / "good") as recording:
        assert recording.steps().step.tolist() == list(range(1, STEPS + 1))


@pytest.mark.parametrize("kind", ENDED)
def test_drops_are_counted_and_shown(found: dict[str, Any], folder: Path, kind: str) -> None:
    frames, size = found[kind]["dropped"]
    assert frames > 0 and size > 0
    lines = [line for line in found[kind]["lines"] if "were dropped" in line]
    assert len(lines) == 1 and "of rank 0" in lines[0]
    if kind != "killed":
        with open_recording(folder / kind) as recording:
            shown = {(each.source, each.rank): each.frames for each in recording.dropped()}
        assert shown.pop(("rank", 0)) > 0
        # A sidecar that reads faster than it writes drops some itself: slow, or going on at last.
        assert set(shown) <= {("sidecar", 0)}


def test_a_killed_sidecar_is_one_line(found: dict[str, Any]) -> None:
    lines = [line for line in found["killed"]["lines"] if "were dropped" not in line]
    assert len(lines) == 1 and "code -9" in lines[0] and "training goes on" in lines[0], lines


@pytest.mark.parametrize("kind", ("frozen", "slow"))
def test_a_sidecar_that_goes_on_is_no_line_but_the_drops(found: dict[str, Any], kind: str) -> None:
    assert len(found[kind]["lines"]) == 1, found[kind]["lines"]
