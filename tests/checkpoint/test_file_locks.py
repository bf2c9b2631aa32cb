"""A lock is held, busy or not supported, on local storage, on NFS and on storage without locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from mt_megatron.checkpoint import file_locks, files, retention
from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.checkpoint.files import MANIFEST, complete_checkpoints
from tests.checkpoint.test_kills import write_and_publish
from tests.nfs_locks import flock_of_nfs, flock_that_fails


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


@pytest.mark.parametrize("nfs", [False, True], ids=["local", "nfs"])
def test_one_writer_or_many_readers(path: Path, nfs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if nfs:
        monkeypatch.setattr(file_locks.fcntl, "flock", flock_of_nfs)
    with FileLock(path, shared=True) as first, FileLock(path, shared=True) as second:
        assert (first.state, second.state) == ("held", "held")
        with FileLock(path) as writer:
            assert writer.state == "busy"
    with FileLock(path) as writer, FileLock(path, shared=True) as reader:
        assert (writer.state, reader.state) == ("held", "busy")


def test_on_nfs_a_descriptor_for_reading_gets_no_exclusive_lock(path: Path) -> None:
    with open(path, "rb") as stream, pytest.raises(OSError, match="Bad file descriptor"):
        flock_of_nfs(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_no_locks_are_not_a_free_lock(path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks.fcntl, "flock", flock_that_fails(number))
    with FileLock(path) as lock:
        assert (lock.state, lock.reason) == ("unsupported", os.strerror(number))


def test_a_process_that_is_forked_does_not_keep_the_lock(path: Path) -> None:
    lock = FileLock(path)
    reading, writing = os.pipe()
    ready, started = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.write(started, b"x")
        os.read(reading, 1)  # Lives until the parent says so.
        os._exit(0)
    try:
        os.read(ready, 1)
        with FileLock(path) as other:
            assert other.state == "busy", "the parent's is not let go by the fork"
        lock.close()
        with FileLock(path) as other:
            assert other.state == "held", "the child has none"
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        for each in (reading, ready, started):
            os.close(each)


def test_a_lock_knows_that_its_file_was_replaced(path: Path) -> None:
    with FileLock(path) as lock:
        assert lock.names_the_file()
        path.unlink()
        assert not lock.names_the_file()
        path.write_text("")
        assert not lock.names_the_file()


def test_on_nfs_a_checkpoint_that_somebody_reads_is_not_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_locks.fcntl, "flock", flock_of_nfs)
    for iteration in (10, 20):
        write_and_publish(tmp_path, iteration, b"a")
    with retention.in_use(tmp_path / "iter_0000010"):
        assert retention.prune(tmp_path, keep_last=1, retain_interval=None) == []
    assert retention.prune(tmp_path, keep_last=1, retain_interval=None) == [tmp_path / "iter_0000010"]


def test_without_locks_both_sides_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks.fcntl, "flock", flock_that_fails(errno.ENOLCK))
    for iteration in (10, 20):
        write_and_publish(tmp_path, iteration, b"a")
    said: list[str] = []
    with retention.in_use(tmp_path / "iter_0000020", said.append):
        pass
    retention.prune(tmp_path, keep_last=1, retain_interval=None, say=said.append)
    assert len(said) == 2
    assert "iter_0000020 is read without a lock" in said[0] and "No locks available" in said[0]
    assert "iter_0000010 is removed without a look" in said[1]


def test_a_checkpoint_that_cannot_be_removed_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither now, nor a new one of its step while what stays of the old one still lies there."""
    for iteration in (10, 20, 30):
        write_and_publish(tmp_path, iteration, b"a")
    real = shutil.rmtree

    def refused(path: Path, ignore_errors: bool = False) -> None:
        if "iter_0000010" not in str(path):
            real(path)
        elif not ignore_errors:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(files.shutil, "rmtree", refused)
    said: list[str] = []
    assert retention.prune(tmp_path, keep_last=1, retain_interval=None, say=said.append) == [
        tmp_path / "iter_0000010",
        tmp_path / "iter_0000020",
    ]
    assert (
        len(said) == 1 and "/.iter_0000010." in said[0] and ".pruned stays" in said[0] and "busy" in said[0]
    )
    write_and_publish(tmp_path, 10, b"b")
    write_and_publish(tmp_path, 40, b"b")
    removed = retention.prune(tmp_path, keep_last=1, retain_interval=None, say=said.append)
    assert removed == [tmp_path / "iter_0000010", tmp_path / "iter_0000030"] and len(said) == 2
    assert complete_checkpoints(tmp_path) == [tmp_path / "iter_0000040"]
    monkeypatch.undo()
    retention.recover(tmp_path)
    assert not list(tmp_path.glob(".iter_*"))


def test_a_manifest_that_cannot_be_opened_for_writing_keeps_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 20):
        write_and_publish(tmp_path, iteration, b"a")
    real = os.open

    def refused(path: object, flags: int, *mode: int, **more: object) -> int:
        if str(path).endswith(MANIFEST) and flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *mode, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(file_locks.os, "open", refused)
    said: list[str] = []
    assert retention.prune(tmp_path, keep_last=1, retain_interval=None, say=said.append) == []
    assert "iter_0000010 is not removed" in said[0] and "Permission denied" in said[0]
    assert len(complete_checkpoints(tmp_path)) == 2
