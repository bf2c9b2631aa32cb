"""A kill at any moment of publishing, replacing or pruning leaves a whole newest checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mt_megatron.checkpoint import files, retention

CONTENT = ("common.pt", "__0_0.distcp", "__1_0.distcp", "rng/rank_00000.pt")
PUBLISHING = ("manifest", "marker", "moved_away", "renamed", "pointer", "pruning")


def write_and_publish(
    directory: Path, iteration: int, mark: bytes, *, keep_last: int | None = None, owner: str | None = None
) -> list[str]:
    """What a save does with files, with other content for every ``mark``; its lines for the log."""
    final = directory / files.folder_name(iteration)
    owner = owner or files.owner_name()
    partial = directory / f".{final.name}.{owner}.partial"
    listed = {}
    for name in CONTENT:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(name.encode() + mark * 1000)
        listed[name] = files.checksum(partial / name)
    files.write_manifest(partial, {"files": listed, "mark": mark.decode()})
    lines = files.publish(partial, final, owner)
    retention.prune(directory, keep_last=keep_last, retain_interval=None)
    return lines


def in_a_process_that_dies(directory: Path, iteration: int, mark: bytes, point: str) -> int:
    """Publish in a child that kills itself at the first time it reaches ``point``; its exit code."""
    child = os.fork()
    if child == 0:
        files.reached_point = lambda name: os._exit(9) if name == point else None
        try:
            write_and_publish(directory, iteration, mark, keep_last=1)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def newest(directory: Path) -> tuple[str, str]:
    """Name and mark of the newest checkpoint as the next run finds it, which must be whole."""
    retention.recover(directory)
    folder = files.latest_checkpoint(directory)
    assert folder is not None
    document = files.read_manifest(folder)
    assert files.damaged_files(folder, document) == []
    assert [
        each.name for each in directory.iterdir() if each.name.endswith(("partial", "pruned", "replaced"))
    ] == []
    return folder.name, document["mark"]


@pytest.mark.parametrize("point", PUBLISHING)
def test_a_kill_while_a_new_one_is_published(tmp_path: Path, point: str) -> None:
    write_and_publish(tmp_path, 10, b"a")
    died = in_a_process_that_dies(tmp_path, 20, b"b", point)
    assert died == (0 if point == "moved_away" else 9), "the point was not reached"
    arrived = point in ("pointer", "pruning", "moved_away")
    assert newest(tmp_path) == (("iter_0000020", "b") if arrived else ("iter_0000010", "a"))


@pytest.mark.parametrize("point", PUBLISHING)
def test_a_kill_while_one_of_the_same_step_is_replaced(tmp_path: Path, point: str) -> None:
    write_and_publish(tmp_path, 10, b"a")
    died = in_a_process_that_dies(tmp_path, 10, b"b", point)
    assert died == (0 if point == "pruning" else 9), "the point was not reached"
    arrived = point in ("renamed", "pointer", "pruning")
    assert newest(tmp_path) == ("iter_0000010", "b" if arrived else "a")


def test_a_kill_before_the_first_pointer_is_written(tmp_path: Path) -> None:
    assert in_a_process_that_dies(tmp_path, 10, b"a", "renamed") == 9
    assert not (tmp_path / files.LATEST).exists()
    assert newest(tmp_path) == ("iter_0000010", "a")


def test_without_bringing_back_what_was_moved_away_it_would_be_lost(tmp_path: Path) -> None:
    write_and_publish(tmp_path, 10, b"a")
    assert in_a_process_that_dies(tmp_path, 10, b"b", "moved_away") == 9
    with pytest.raises(files.CheckpointError, match="names iter_0000010, which is not there"):
        files.latest_checkpoint(tmp_path)
    assert newest(tmp_path) == ("iter_0000010", "a")
