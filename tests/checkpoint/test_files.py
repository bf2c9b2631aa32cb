"""Which checkpoint is found, and what is said about one that is not whole."""

from __future__ import annotations

import argparse
import errno
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mt_megatron.checkpoint import file_locks, files, retention
from mt_megatron.checkpoint.files import (
    LATEST,
    MANIFEST,
    latest_checkpoint,
    read_manifest,
    resolve_checkpoint,
    write_durably,
)
from mt_megatron.checkpoint.save import SaveReport
from mt_megatron.checkpoint.store import CheckpointStore
from mt_megatron.cli import fp8
from mt_megatron.config.schema import CheckpointConfig
from mt_megatron.convert.folders import megatron_folder
from mt_megatron.errors import CheckpointError
from mt_megatron.scan.format.run_files import existing_run
from mt_megatron.scope.recording.files import existing_recording
from tests.checkpoint.test_kills import CONTENT, write_and_publish


def make(folder: Path, iteration: int) -> Path:
    path = folder / f"iter_{iteration:07d}"
    path.mkdir()
    (path / MANIFEST).write_text("{}")
    return path


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="found no checkpoint"):
        resolve_checkpoint(tmp_path)


def test_the_pointer_decides_not_the_largest_number(tmp_path: Path) -> None:
    older, _ = make(tmp_path, 10), make(tmp_path, 20)
    (tmp_path / LATEST).write_text("10\n")
    assert latest_checkpoint(tmp_path) == older
    assert resolve_checkpoint(tmp_path) == older


def test_a_checkpoint_is_found_by_its_own_path(tmp_path: Path) -> None:
    path = make(tmp_path, 20)
    assert resolve_checkpoint(path) == path


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / LATEST).write_text("10")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        latest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        resolve_checkpoint(tmp_path / "iter_0000010")


def test_a_damaged_pointer_and_a_damaged_manifest_are_named(tmp_path: Path) -> None:
    path = make(tmp_path, 10)
    (tmp_path / LATEST).write_text("release")
    with pytest.raises(CheckpointError, match="says 'release', expected an iteration"):
        latest_checkpoint(tmp_path)
    (path / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(path)


def test_durable_writing_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, "old")
    write_durably(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_durably(tmp_path / "file", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(tmp_path / "file", "new")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def names(directory: Path) -> list[int]:
    return [files.iteration_of(each) or 0 for each in files.complete_checkpoints(directory)]


def test_the_newest_of_several_without_a_pointer_is_continued(tmp_path: Path) -> None:
    make(tmp_path, 10)
    newer = make(tmp_path, 20)
    assert latest_checkpoint(tmp_path) == newer


def test_a_pointer_to_nothing_names_what_is_there(tmp_path: Path) -> None:
    make(tmp_path, 10)
    (tmp_path / LATEST).write_text("30")
    with pytest.raises(CheckpointError, match=r"iter_0000030, which is not there.*iter_0000010"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("name", [*CONTENT, MANIFEST, files.MARKER])
def test_one_flipped_byte_anywhere_is_named(tmp_path: Path, name: str) -> None:
    write_and_publish(tmp_path, 10, b"a")
    folder = tmp_path / "iter_0000010"
    size = (folder / name).stat().st_size
    for position in {0, size // 3, size // 2, size - 1}:
        content = bytearray((folder / name).read_bytes())
        content[position] ^= 0x01
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name} is damaged: found .*, expected"):
            lines = files.damaged_files(folder, read_manifest(folder))
            raise CheckpointError("; ".join(lines))
        content[position] ^= 0x01
        (folder / name).write_bytes(content)
    assert files.damaged_files(folder, read_manifest(folder)) == []


def test_files_that_are_missing_or_cut_off_are_named(tmp_path: Path) -> None:
    write_and_publish(tmp_path, 10, b"a")
    folder = tmp_path / "iter_0000010"
    (folder / CONTENT[0]).unlink()
    with open(folder / CONTENT[1], "r+b") as stream:
        stream.truncate(100)
    lines = files.damaged_files(folder, read_manifest(folder))
    assert len(lines) == 2
    assert any("common.pt cannot be read: No such file" in line for line in lines)
    assert any("found 100 bytes with crc32" in line and "expected 1012 with" in line for line in lines)


def test_the_shares_of_all_readers_are_every_file_once(tmp_path: Path) -> None:
    write_and_publish(tmp_path, 10, b"a")
    folder = tmp_path / "iter_0000010"
    document = read_manifest(folder)
    for name in CONTENT:
        (folder / name).unlink()
    found = [files.damaged_files(folder, document, reader=reader, readers=3) for reader in range(3)]
    assert sorted(len(each) for each in found) == [1, 1, 2]
    assert len({line for each in found for line in each}) == len(CONTENT)


def test_a_folder_without_its_marker_is_not_complete(tmp_path: Path) -> None:
    write_and_publish(tmp_path, 10, b"a")
    (tmp_path / "iter_0000010" / files.MARKER).unlink()
    with pytest.raises(CheckpointError, match="no COMPLETE"):
        latest_checkpoint(tmp_path)


def test_the_last_few_and_every_so_many_are_kept(tmp_path: Path) -> None:
    for iteration in range(10, 70, 10):
        write_and_publish(tmp_path, iteration, b"a")
    retention.prune(tmp_path, keep_last=None, retain_interval=None)
    assert names(tmp_path) == [10, 20, 30, 40, 50, 60]
    retention.prune(tmp_path, keep_last=2, retain_interval=20)
    assert names(tmp_path) == [20, 40, 50, 60]
    retention.prune(tmp_path, keep_last=None, retain_interval=40)
    assert names(tmp_path) == [40, 60]
    retention.prune(tmp_path, keep_last=1, retain_interval=None)
    assert names(tmp_path) == [60]
    retention.prune(tmp_path, keep_last=1, retain_interval=None)
    assert names(tmp_path) == [60]


def test_saves_by_the_clock_that_fall_on_no_multiple_are_kept_every_so_many(tmp_path: Path) -> None:
    for iteration in (700, 1437, 1790, 2871, 4310, 4990, 5001):
        write_and_publish(tmp_path, iteration, b"a")
        retention.prune(tmp_path, keep_last=None, retain_interval=1000)
    assert names(tmp_path) == [1437, 2871, 4310, 5001]
    write_and_publish(tmp_path, 5400, b"a")
    retention.prune(tmp_path, keep_last=None, retain_interval=1000)
    assert names(tmp_path) == [1437, 2871, 4310, 5001, 5400]


def test_a_branch_that_was_left_takes_no_place_of_this_ones(tmp_path: Path) -> None:
    for iteration in (1012, 1497, 1530, 2003):
        write_and_publish(tmp_path, iteration, b"a")
    newest = tmp_path / "iter_0002003"
    files.write_manifest(newest, {**read_manifest(newest), "left_behind": [1530]})
    retention.prune(tmp_path, keep_last=2, retain_interval=None)
    assert names(tmp_path) == [1497, 1530, 2003]


def test_going_back_names_the_branch_that_is_left(tmp_path: Path) -> None:
    for iteration in (1012, 1530, 2040):
        write_and_publish(tmp_path, iteration, b"a")
    (tmp_path / LATEST).write_text("1530\n")
    job: Any = SimpleNamespace(is_main=True)
    trainable: Any = None
    store = CheckpointStore(CheckpointConfig(), trainable, job, {}, print)
    manifest: Any = SimpleNamespace(directory=tmp_path, manifest={"versions": {}}, owner="x")
    store._saver = manifest
    store._leave_behind(tmp_path / "iter_0001012")
    assert store._saver is not None and store._saver.manifest["left_behind"] == [1530, 2040]
    # Its own save of such a step is of this branch.
    store._left_behind -= {1530}
    store._name_left_behind()
    assert store._saver.manifest == {"versions": {}, "left_behind": [2040]}


def test_later_steps_of_another_branch_are_not_pruned(tmp_path: Path) -> None:
    for iteration in (10, 20, 30, 40):
        write_and_publish(tmp_path, iteration, b"a")
    write_and_publish(tmp_path, 30, b"b", keep_last=1)
    assert names(tmp_path) == [30, 40]
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000030"


def busy(path: Path, ignore_errors: bool = False) -> None:
    """In place of ``shutil.rmtree`` where another process has a file open."""
    if not ignore_errors:
        raise OSError(16, "Device or resource busy")


def test_a_replaced_one_that_cannot_be_removed_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, said = files.owner_name(), list[str]()
    assert write_and_publish(tmp_path, 10, b"a", owner=owner) == []
    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", busy)
        for mark in (b"b", b"c", b"d"):
            (line,) = write_and_publish(tmp_path, 10, mark, owner=owner)
            assert "iter_0000010" in line and "cannot be removed now (Device or resource busy)" in line
        # The next start, while that process still has it open.
        retention.recover(tmp_path, say=said.append)
    left = sorted(tmp_path.glob(".iter_*"))
    assert len(left) == 3 and [line.split(" stays: ")[0] for line in said] == [str(each) for each in left]
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000010"
    assert read_manifest(tmp_path / "iter_0000010")["mark"] == "d"
    write_and_publish(tmp_path, 20, b"b", keep_last=1)
    retention.recover(tmp_path)
    assert names(tmp_path) == [20] and not list(tmp_path.glob(".iter_*")), "it does not come back"


def test_what_recovery_cannot_remove_of_a_replaced_one_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between naming step 10 anew and removing the old one; then step 10 is pruned."""
    write_and_publish(tmp_path, 10, b"a")
    (tmp_path / "iter_0000010").rename(tmp_path / f".iter_0000010.{files.owner_name()}.replaced")
    for iteration in (10, 20):
        write_and_publish(tmp_path, iteration, b"b")
    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", busy)
        retention.recover(tmp_path)
    retention.prune(tmp_path, keep_last=1, retain_interval=None)
    assert names(tmp_path) == [20] and len(list(tmp_path.glob(".iter_0000010.*"))) == 1
    retention.recover(tmp_path)
    assert names(tmp_path) == [20] and not list(tmp_path.glob(".iter_*"))


def test_the_log_names_a_replaced_checkpoint_that_stays(tmp_path: Path) -> None:
    said: list[str] = []
    job: Any = SimpleNamespace(is_main=True)
    trainable: Any = None
    store = CheckpointStore(CheckpointConfig(), trainable, job, {}, said.append)
    report = SaveReport(iteration=10, folder=tmp_path / "iter_0000010", lines=("it stays",))
    pending: Any = SimpleNamespace(
        iteration=10, collected=True, finish=lambda: report, finish_alone=lambda seconds: report
    )
    store._pending = pending
    assert store._wait() == [report] and said == ["note: it stays"]
    store._pending = pending
    store.close()
    assert said[1:] == ["step 10: the checkpoint that was being written is complete", "note: it stays"]


def test_a_folder_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    files.require_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write checkpoints to .*; change --save"):
        files.require_writable(tmp_path / "file")


def test_a_checkpoint_that_somebody_loads_is_not_pruned(tmp_path: Path) -> None:
    write_and_publish(tmp_path, 10, b"a")
    write_and_publish(tmp_path, 20, b"a")
    with retention.in_use(tmp_path / "iter_0000010"):
        assert retention.prune(tmp_path, keep_last=1, retain_interval=None) == []
    assert retention.prune(tmp_path, keep_last=1, retain_interval=None) == [tmp_path / "iter_0000010"]


def test_a_checkpoint_that_somebody_loads_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "iter_0000010"
    write_and_publish(tmp_path, 10, b"a")
    with retention.in_use(folder), monkeypatch.context() as patched:
        patched.setattr(files, "_SECONDS_FOR_READERS", 0.0)
        with pytest.raises(OSError, match=r"another process reads .*iter_0000010.*stays as it was"):
            write_and_publish(tmp_path, 10, b"b")
        assert read_manifest(folder)["mark"] == "a"
    with ExitStack() as reading:
        reading.enter_context(retention.in_use(folder))
        threading.Timer(0.3, reading.pop_all().close).start()
        write_and_publish(tmp_path, 10, b"c")
    assert read_manifest(folder)["mark"] == "c"


def test_who_begins_to_read_while_one_is_replaced_reads_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "iter_0000010"
    write_and_publish(tmp_path, 10, b"a")
    real = retention.FileLock

    def replaced_meanwhile(path: Path, *, shared: bool = False) -> retention.FileLock:
        lock = real(path, shared=shared)
        monkeypatch.setattr(retention, "FileLock", real)
        folder.rename(tmp_path / "moved")
        write_and_publish(tmp_path, 10, b"b")
        return lock

    monkeypatch.setattr(retention, "FileLock", replaced_meanwhile)
    with retention.in_use(folder):
        (held,) = [lock for lock in file_locks._held if lock.path == folder / MANIFEST]
        assert held.names_the_file() and read_manifest(folder)["mark"] == "b"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_between_the_two_renames_of_a_replacement_a_reader_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its rank alone would raise, and the others wait for it. A checkpoint that does not come is an error."""
    folder, hidden = tmp_path / "iter_0000010", tmp_path / f".iter_0000010.{files.owner_name()}.replaced"
    write_and_publish(tmp_path, 10, b"a")
    real, tried = retention.FileLock, []

    def moved_for_a_while(path: Path, *, shared: bool = False) -> retention.FileLock:
        tried.append(path)
        if len(tried) == 1:
            folder.rename(hidden)
            raise OSError(number, os.strerror(number), str(path))
        if len(tried) == 3:
            hidden.rename(folder)
        return real(path, shared=shared)

    monkeypatch.setattr(retention, "FileLock", moved_for_a_while)
    with retention.in_use(folder):
        assert len(tried) == 3 and read_manifest(folder)["mark"] == "a"
    monkeypatch.setattr(retention, "FileLock", real)
    with pytest.raises(FileNotFoundError), retention.in_use(tmp_path / "iter_0000030"):
        pass
    (tmp_path / ".iter_0000030.x.replaced").mkdir()
    monkeypatch.setattr(retention, "_SECONDS_TO_MOVE", 0.2)
    with pytest.raises(FileNotFoundError), retention.in_use(tmp_path / "iter_0000030"):
        pass


def test_a_reader_is_told_of_a_lock_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_and_publish(tmp_path, 10, b"a")
    monkeypatch.setattr(retention, "_SECONDS_TO_MOVE", 0.2)
    said: list[str] = []
    with (
        file_locks.FileLock(tmp_path / "iter_0000010" / MANIFEST),
        retention.in_use(tmp_path / "iter_0000010", said.append),
    ):
        assert len(said) == 1 and "is read without a lock: another process has held it" in said[0]


@pytest.mark.parametrize("layout", ["launch script", "one folder"])
def test_run_means_the_same_folder_for_every_command(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch scripts save in RUN/checkpoints, ``--save RUN`` beside everything else; a part of a run
    names it as well."""
    run = tmp_path / "run"
    save = run / "checkpoints" if layout == "launch script" else run
    newest = save / files.folder_name(7)
    newest.mkdir(parents=True)
    files.write_manifest(newest, {"layout": {}, "progress": {"iteration": 7}, "config": {}})
    (newest / ".metadata").touch()
    (save / files.LATEST).write_text("7")
    (newest / "config.yaml").write_text("model: {preset: llama3_tiny}\n")
    (run / "metrics.jsonl").touch()
    (run / "scan" / "rank-00000").mkdir(parents=True)
    (run / "scope").mkdir()
    (run / "scope" / "node-host-00000.sqlite").touch()
    for named in (run, save, newest, run / "scan", run / "scope"):
        assert files.run_root(named) == run
        assert existing_run(named).root == run / "scan"
        assert existing_recording(named).root == run / "scope"
        arguments = argparse.Namespace(run=str(named), config_argv=[])
        config, metrics, step = fp8._of(arguments)
        assert config.model.preset == "llama3_tiny" and metrics == run / "metrics.jsonl"
        assert step == (7 if named == newest else None)
    for named in (run, save, newest):
        assert files.resolve_checkpoint(named) == newest
        assert megatron_folder(named) == newest
    monkeypatch.chdir(run)
    assert files.run_root("scan") == Path() and existing_run("scan").root == Path("scan")
    assert files.resolve_checkpoint(Path()) == newest.relative_to(run)
