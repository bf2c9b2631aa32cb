"""Whole runs that are paused, stepped, perturbed, undone and stopped come to the bits of one that nobody
touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

CASES = "tests.scope.control.run_cases"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, f"{CASES}:paused_and_perturbed", str(tmp_path_factory.mktemp("runs")), timeout=400)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, f"{CASES}:kept", str(tmp_path_factory.mktemp("kept")), timeout=400)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, f"{CASES}:ended", str(tmp_path_factory.mktemp("ended")), timeout=400)


def _whole(each: dict[str, Any], name: str) -> dict[str, Any]:
    run: dict[str, Any] = each[name]
    assert run["problems"] == [] and run["error"] is None, (name, run["problems"], run["error"])
    return run


def test_a_paused_run_comes_to_the_same_bits(found: list[dict[str, Any]]) -> None:
    for each in found:
        alone, paused = _whole(each, "alone"), _whole(each, "paused")
        assert paused["finished"] and paused["digest"] == alone["digest"]
        assert paused["losses"] == alone["losses"] and paused["attempts"] == 8
    lines = "\n".join(found[0]["paused"]["lines"])
    assert "scope: paused after step" in lines and "scope: goes on after step" in lines
    assert "control RUN" not in lines, "the command can be pasted"
    audit = found[0]["paused"]["audit"]
    assert audit.count("paused") == 2 and audit.count("resumed") == 2, audit


def test_perturbed_steps_are_marked_and_undone_by_themselves(found: list[dict[str, Any]]) -> None:
    for each in found:
        alone, undone = _whole(each, "alone"), _whole(each, "undone")
        assert undone["finished"] and undone["digest"] == alone["digest"]
        assert undone["losses"] == alone["losses"], "of each step the last attempt"
        assert undone["perturbed"] == [3, 4, 5, 6] and undone["attempts"] == 8 + 4
        assert undone["checkpoints"] == ["iter_0000002", "iter_0000004", "iter_0000006", "iter_0000008"]
    lines = found[0]["undone"]["lines"]
    assert sum("no checkpoint is written while the run is perturbed (noise)" in line for line in lines) == 2
    assert any(
        "noise is armed for step 3: gaussian" in line and "unless undo_at has" in line for line in lines
    )
    assert found[0]["undone"]["audit"] == ["armed", "acts", "over", "undone"]


@pytest.mark.daily
def test_what_was_saved_under_a_perturbation_stays_marked(kept: list[dict[str, Any]]) -> None:
    for each in kept:
        first, later = _whole(each, "kept"), _whole(each, "goes on")
        assert first["marks"] == {"iter_0000002": None, "iter_0000004": "noise"}
        assert first["perturbed"] == [3, 4]
        assert later["marks"] == {**first["marks"], "iter_0000006": "noise"}
        assert later["perturbed"] == [3, 4, 5, 6] and later["attempts"] == 6, (
            "its steps are over: nothing acts"
        )
        assert set(later["validated"]) == {"noise"}
        assert _whole(each, "from its weights")["marks"] == {"iter_0000002": "noise"}
    lines = kept[0]["goes on"]["lines"]
    assert any("is of a perturbed run (noise)" in line for line in lines)
    assert any("noise is left out: its steps are over at step 4" in line for line in lines)


@pytest.mark.daily
def test_after_a_rollback_nothing_is_marked_that_the_checkpoint_was_not_under(
    kept: list[dict[str, Any]],
) -> None:
    for each in kept:
        back = _whole(each, "rolled back")
        assert back["finished"] and back["iteration"] == 6
        assert not {4, 5, 6} & set(back["perturbed"]) and set(back["validated"]) == {None}
        assert back["marks"] == {"iter_0000002": None, "iter_0000004": None, "iter_0000006": None}
    assert any("Back to the weights of step 2" in line for line in kept[0]["rolled back"]["lines"])


@pytest.mark.daily
def test_a_run_that_fails_perturbed_says_so_in_what_it_saves(ended: list[dict[str, Any]]) -> None:
    for each in ended:
        failed = each["failed"]
        assert failed["error"].startswith("DivergenceError") and failed["problems"] == []
        assert "without what the run is perturbed by (scaled; nan) is finite" in failed["error"]
        assert failed["marks"] == {"iter_0000003": "scaled; nan"}


@pytest.mark.daily
def test_a_run_that_ends_perturbed_saves_what_it_was_before(ended: list[dict[str, Any]]) -> None:
    for each in ended:
        saved, continued = _whole(each, "ended"), _whole(each, "continued")
        assert saved["iteration"] == 2 and saved["checkpoints"] == ["iter_0000002"]
        assert continued["finished"] and continued["digest"] == each["alone"]["digest"]
    assert any("what is saved is step 2" in line for line in ended[0]["ended"]["lines"])


@pytest.mark.daily
def test_a_signal_in_a_pause_saves_and_ends(ended: list[dict[str, Any]]) -> None:
    for each in ended:
        stopped, resumed = _whole(each, "stopped"), _whole(each, "resumed")
        assert not stopped["finished"] and len(stopped["checkpoints"]) == 1
        assert resumed["finished"] and resumed["digest"] == each["alone"]["digest"]
    assert any("stopped on request" in line for line in ended[0]["stopped"]["lines"])


@pytest.mark.daily
def test_a_pattern_that_meets_nothing_ends_the_run_before_its_first_step(ended: list[dict[str, Any]]) -> None:
    for each in ended:
        assert "found no parameter 'decoder.layers.7.*' on any rank" in each["wrong"]["error"]
        assert each["wrong"]["attempts"] == 0


@pytest.mark.daily
def test_a_step_that_diverges_perturbed_is_undone(ended: list[dict[str, Any]]) -> None:
    for each in ended:
        diverged = _whole(each, "diverged")
        assert diverged["finished"] and diverged["digest"] == each["alone"]["digest"]
        assert diverged["losses"] == each["alone"]["losses"] and diverged["attempts"] == 8
    assert any("step 4 diverged under nan" in line for line in ended[0]["diverged"]["lines"])


def test_a_command_that_fails_on_one_rank_leaves_no_other_waiting() -> None:
    """Where all are out of it the run goes on; where one is in the middle the run ends, before the next
    collective."""
    first, failed = run_ranks(2, "tests.scope.control.failing_cases:failing", 1.0, timeout=90)
    for name in ("at its end", "after it"):
        assert first[name]["error"] == "pair failed on another rank; its log says why"
        assert failed[name] is None
    assert first["in the middle"]["error"] == "generate failed on another rank; its log says why"
    assert "generate failed on rank 1 alone (MemoryError: no room) while rank 0 is" in failed["in the middle"]
    # The run would end in the middle of the second one; of the others no word stays in the store.
    assert first["keys"] == [False, False, False] and failed["keys"] == [False, True, False]


def _trials(tmp_path: Path, count: int, seed: int) -> dict[str, int]:
    """Pauses of all trials, and how many of them ended without their commander."""
    ranks = run_ranks(2, f"{CASES}:trials", str(tmp_path), count, seed, timeout=60 + 30 * count)
    for rank in ranks:
        alone, *others = rank
        assert len(others) == count
        for number, each in enumerate(others):
            assert each["error"] is None and each["finished"], (number, each["error"], each["lines"][-3:])
            # A commander may come too late for a short run; nothing else goes wrong.
            assert not [text for text in each["problems"] if "no answer" not in text], each["problems"]
            assert each["digest"] == alone["digest"] and each["losses"] == alone["losses"], number
    trials = ranks[0][1:]
    pauses = sum(each["audit"].count("paused") for each in trials)
    assert pauses >= count and pauses == sum(each["audit"].count("resumed") for each in trials)
    lines = [line for each in trials for line in each["lines"]]
    return {"pauses": pauses, "left": sum("nobody has held the pause" in line for line in lines)}


def test_random_pauses(tmp_path: Path) -> None:
    _trials(tmp_path, 3, 1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_two_hundred_random_pauses(tmp_path: Path, seed: int, record_property: Any) -> None:
    for name, number in _trials(tmp_path, 20, seed + 2).items():
        record_property(name, number)
