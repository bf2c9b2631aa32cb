"""An error that every rank meets costs no step; one that is not shared, or half an update, saves nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mt_megatron.checkpoint.progress import Progress
from mt_megatron.checkpoint.store import DEFAULT_MINUTES, save_interval_in_mins
from mt_megatron.config.rampup import batch_sizes
from mt_megatron.config.schema import CheckpointConfig, DataConfig
from mt_megatron.data.loader.sample_need import require_samples
from mt_megatron.errors import DataError
from mt_megatron.training.health.shared_error import ErrorMeeting, Met
from tests.launch import run_ranks


def names(*steps: int) -> list[str]:
    return [f"iter_{step:07d}" for step in steps]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("errors")
    results = run_ranks(2, "tests.training.health.error_cases:all_cases", str(folder), timeout=400)
    return {**results[0], "other": results[1], "folder": folder}


@pytest.mark.parametrize(("name", "error"), [("diverged", "DivergenceError"), ("shared", "DataError")])
def test_the_last_sound_step_is_saved_and_continued_to_the_bit(
    found: dict[str, Any], name: str, error: str
) -> None:
    for rank in (found, found["other"]):
        assert error in rank[name]["error"]
    assert found[name]["there"] == names(3)
    assert f"every rank met {error}: step 3, the last sound one, is saved first" in found[name]["said"]
    continued = found[f"{name}_then"]
    assert min(continued["steps"], key=int) == "4", "the step that failed is made again"
    assert continued["steps"] == {
        step: values for step, values in found["whole"]["steps"].items() if int(step) > 3
    }


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("not_shared", "rank 1 met CheckpointError after step 3"),
        ("half", "the error came in the middle of an update"),
    ],
)
def test_nothing_is_saved_that_is_not_sound_or_not_agreed_on(
    found: dict[str, Any], name: str, why: str
) -> None:
    assert found[name]["there"] == []
    assert "the steps since the last checkpoint are not saved" in found[name]["said"]
    assert why in found[name]["said"]


def test_a_save_in_flight_is_finished(found: dict[str, Any]) -> None:
    assert found["in_flight"]["there"] == names(3, 4)


def test_what_all_ranks_have_written_is_completed_by_rank_0_alone(found: dict[str, Any]) -> None:
    assert found["published_alone"]["there"] == names(3)
    assert "step 3: the checkpoint that was being written is complete" in found["published_alone"]["said"]


def test_weights_that_are_not_finite_are_never_written(found: dict[str, Any]) -> None:
    assert found["not_finite"]["there"] == names(2)
    assert "rank 0: decoder.final_layernorm.weight is not finite" in found["not_finite"]["said"]
    assert [each.name for each in (found["folder"] / "not_finite").glob(".iter*")] == []


def test_older_checkpoints_go_when_the_newest_is_proven(found: dict[str, Any]) -> None:
    assert found["not_proven"]["there"] == names(2, 4)
    assert found["proven"]["there"] == names(6)


def test_the_last_checkpoint_is_read_back_before_older_ones_go(found: dict[str, Any]) -> None:
    assert found["read_back"]["there"] == names(3, 6)
    assert "the checkpoint of step 6 is lost: it is not what was written" in found["read_back"]["error"]
    assert "__0_0.distcp is damaged" in found["read_back"]["error"]


def test_without_an_interval_the_clock_decides(found: dict[str, Any]) -> None:
    assert found["by_the_clock"]["there"] == names(1, 2, 3)
    assert save_interval_in_mins(CheckpointConfig(save="x")) == DEFAULT_MINUTES == 30
    assert save_interval_in_mins(CheckpointConfig(save="x", save_interval=100)) is None
    assert save_interval_in_mins(CheckpointConfig(save="x", save_interval_in_mins=0.0)) is None
    assert save_interval_in_mins(CheckpointConfig(save="x", save_interval=9, save_interval_in_mins=5)) == 5
    assert save_interval_in_mins(CheckpointConfig()) is None


def test_too_little_data_is_refused_before_the_first_step(found: dict[str, Any]) -> None:
    for rank in (found, found["other"]):
        error = rank["too_little_data"]["error"]
        assert "found 15 training samples; expected 24" in error and "used up after step 3" in error
    assert found["too_little_data"]["there"] == []


def needed(found: int, *, progress: Progress | None = None, paths: tuple[str, ...] = ("a",)) -> None:
    data = DataConfig(train_data_path=paths)
    require_samples(found, progress or Progress(), 10, batch_sizes(None, 4), data)


def test_what_is_enough_passes() -> None:
    needed(40)
    needed(44, progress=Progress(iteration=5, consumed_samples=24))
    with pytest.raises(DataError, match="--train-iters 9, or to more data"):
        needed(39)
    ramped = batch_sizes((2, 2, 8), 4)
    samples = int(ramped.samples_after(10))
    require_samples(samples, Progress(), 10, ramped, DataConfig())
    with pytest.raises(DataError, match=f"expected {samples}"):
        require_samples(samples - 1, Progress(), 10, ramped, DataConfig())


def test_the_fix_is_in_the_message() -> None:
    with pytest.raises(DataError, match=r"without weights are read once.*--train-data-path 0\.5 a 0\.5 b"):
        needed(20, paths=("a", "b"))
    with pytest.raises(DataError, match="made for 40 samples.*step 8 had consumed 64 .*size as it was"):
        needed(40, progress=Progress(iteration=8, consumed_samples=64))


def meet(*comers: tuple[float, Met], seconds: float) -> list[str | None]:
    """What each rank hears that comes after so many seconds with what it met."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    heard: list[str | None] = [None] * len(comers)

    def come(rank: int, after: float, met: Met) -> None:
        time.sleep(after)
        meeting = ErrorMeeting("x", rank=rank, world_size=len(comers), store=store, seconds=seconds)
        heard[rank] = meeting.compare(met)

    threads = [threading.Thread(target=come, args=(rank, *each)) for rank, each in enumerate(comers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


SAME = Met(kind="DataError", iteration=3, place="batches.py:9 train_batches")


def test_all_who_come_hear_the_same() -> None:
    assert meet((0.0, SAME), (0.1, SAME), (0.2, SAME), seconds=5) == [None] * 3
    other = Met(kind="DataError", iteration=4, place=SAME.place)
    heard = meet((0.0, SAME), (0.0, other), seconds=5)
    assert all(line is not None for line in heard) and "rank 1 met DataError after step 4" in str(heard[0])


def test_who_comes_too_late_cannot_save_alone() -> None:
    first, late = meet((0.0, SAME), (3.0, SAME), seconds=0.3)
    assert "ranks [1] met none within 0.3 s" in str(first)
    assert late is not None, "it sees both, and rank 0 has left"


def test_a_store_that_is_gone_is_no_agreement(tmp_path: Path) -> None:
    class Gone:
        def set(self, *args: Any) -> None:
            raise RuntimeError("Connection reset by peer")

    meeting = ErrorMeeting("x", rank=0, world_size=2, store=Gone())
    assert "Connection reset" in str(meeting.compare(SAME))
