"""Two runs in one folder: the second is refused by name, and neither loses a file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mt_megatron.backends.distributed import rendezvous
from mt_megatron.checkpoint import file_locks, retention
from mt_megatron.checkpoint.files import MANIFEST, complete_checkpoints, folder_name, owner_name
from mt_megatron.checkpoint.run_lock import LOCK, RunLock, _let_restarts_in, _require_own
from mt_megatron.config.schema import CheckpointConfig
from mt_megatron.errors import CheckpointError
from tests.launch import run_ranks
from tests.nfs_locks import flock_of_nfs, flock_that_fails

FLOCK = fcntl.flock


@contextmanager
def another_run(directory: Path) -> Iterator[int]:
    """A process that holds the lock of ``directory``, on storage with locks; its number."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            fcntl.flock = FLOCK
            lock = RunLock(directory)
            os.write(write, b"held")
            signal.pause()
            lock.close()
        finally:
            os._exit(1)
    os.close(write)
    try:
        assert os.read(read, 4) == b"held"
        yield process
    finally:
        os.close(read)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_the_second_run_is_told_who_the_first_is(tmp_path: Path) -> None:
    with another_run(tmp_path) as process, pytest.raises(CheckpointError) as refused:
        RunLock(tmp_path)
    assert re.search(f"process {process} on host .*, since 20.*another --save", str(refused.value))
    # Killed with SIGKILL: nothing of it is left.
    lock = RunLock(tmp_path)
    assert lock.unsupported is None
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        RunLock(tmp_path)
    lock.close()
    RunLock(tmp_path).close()
    assert (tmp_path / LOCK).read_text() == ""


def test_on_nfs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks.fcntl, "flock", flock_of_nfs)
    with another_run(tmp_path), pytest.raises(CheckpointError, match="another run saves to"):
        RunLock(tmp_path)
    RunLock(tmp_path).close()


def test_without_locks_the_process_is_looked_for_and_the_rest_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_locks.fcntl, "flock", flock_that_fails(errno.ENOLCK))
    with another_run(tmp_path), pytest.raises(CheckpointError, match="another run saves to"):
        RunLock(tmp_path)
    lock = RunLock(tmp_path)
    assert lock.unsupported is not None and "No locks available" in lock.unsupported
    lock.close()


def test_without_locks_a_number_that_another_process_has_by_now_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that was killed and starts again: numbers are given anew from 1 on."""
    monkeypatch.setattr(file_locks.fcntl, "flock", flock_that_fails(errno.ENOLCK))
    with another_run(tmp_path):
        said = json.loads((tmp_path / LOCK).read_text())
        (tmp_path / LOCK).write_text(json.dumps(said | {"began": said.get("began", 1) - 1}))
        RunLock(tmp_path).close()


def hidden(directory: Path, iteration: int, owner: str, kind: str) -> Path:
    path = directory / f".{folder_name(iteration)}.{owner}.{kind}"
    path.mkdir()
    (path / "file").write_text("x")
    return path


def test_without_a_lock_only_what_is_known_to_be_left_goes(tmp_path: Path) -> None:
    host = owner_name().rsplit("-", 2)[0]
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    mine = hidden(tmp_path, 1, owner_name(), "partial")
    ended = hidden(tmp_path, 1, f"{host}-{child}-00000000", "partial")
    living = hidden(tmp_path, 2, f"{host}-{os.getppid()}-00000000", "partial")
    elsewhere = hidden(tmp_path, 3, "other-1-00000000", "partial")
    being_replaced = hidden(tmp_path, 4, f"{host}-{os.getppid()}-00000000", "replaced")
    to_bring_back = hidden(tmp_path, 5, f"{host}-{child}-00000000", "replaced")
    said: list[str] = []
    retention.recover(tmp_path, alone=False, say=said.append)
    assert [each.exists() for each in (mine, ended, to_bring_back)] == [False] * 3
    assert [each.exists() for each in (living, elsewhere, being_replaced)] == [True] * 3
    assert (tmp_path / folder_name(5) / "file").exists() and len(said) == 3
    retention.recover(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [folder_name(4), folder_name(5)]


def test_continuing_from_elsewhere_on_top_of_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("source", "other"):
        place = tmp_path / folder / folder_name(3)
        place.mkdir(parents=True)
        (place / MANIFEST).write_text("{}")
    source, other = tmp_path / "source", tmp_path / "other"
    (tmp_path / "link").symlink_to(other)
    own = (other, other / folder_name(3), tmp_path / "link", tmp_path / "link" / folder_name(3))
    for resume in ("auto", *map(str, own)):
        _require_own(other, CheckpointConfig(resume=resume))
    for resume in (str(source), str(source / folder_name(3))):
        with pytest.raises(
            CheckpointError, match=f"1 checkpoints of another run, .* --resume {resume} would"
        ):
            _require_own(other, CheckpointConfig(resume=resume))
        _require_own(other, CheckpointConfig(resume=resume, save_over_others=True))
        _require_own(tmp_path / "empty", CheckpointConfig(resume=resume))
        # Started again by torchrun: they may be its own.
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        _require_own(other, CheckpointConfig(resume=resume))
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")


def starts_of_a_launcher(monkeypatch: pytest.MonkeyPatch, store: Any, number: int, counted: str) -> None:
    """Let this be rank 0 of torchrun's start ``number``, on a node that counts ``counted`` failures."""
    monkeypatch.setattr(rendezvous, "_attempt", rendezvous.Attempt(store=store, number=number))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", counted)


def test_a_restart_that_another_node_counts_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, store = CheckpointConfig(resume=str(tmp_path / "source")), HashStore()
    starts_of_a_launcher(monkeypatch, store, 1, "0")
    _require_own(tmp_path / "own", options)
    _let_restarts_in(tmp_path / "own")
    place = tmp_path / "own" / folder_name(3)
    place.mkdir(parents=True)
    (place / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match="checkpoints of another run"):
        _require_own(tmp_path / "own", options)  # Another run of the same process.
    for number in (2, 3):
        starts_of_a_launcher(monkeypatch, store, number, "0")
        _require_own(tmp_path / "own", options)
        _let_restarts_in(tmp_path / "own")


def test_a_restart_after_a_refusal_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / folder_name(3)
    place.mkdir()
    (place / MANIFEST).write_text("{}")
    options, store = CheckpointConfig(resume="elsewhere"), HashStore()
    for number in (1, 2):
        starts_of_a_launcher(monkeypatch, store, number, str(number - 1))
        with pytest.raises(CheckpointError, match="checkpoints of another run"):
            _require_own(tmp_path, options)
    # A launcher's store that went with its node: what this node counts is left.
    starts_of_a_launcher(monkeypatch, HashStore(), 1, "1")
    _require_own(tmp_path, options)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("two_runs")
    (folder / "taken").mkdir()
    with another_run(folder / "taken"):
        results = run_ranks(2, "tests.checkpoint.run_lock_cases:all_cases", str(folder), timeout=300)
    return {"ranks": results, "folder": folder}


def test_every_rank_of_the_second_run_is_refused(found: dict[str, Any]) -> None:
    for result in found["ranks"]:
        assert "CheckpointError: another run saves to" in result["taken"]["error"]
    assert [each.name for each in (found["folder"] / "taken").iterdir()] == [LOCK]


def test_starting_anew_on_top_of_another_run_is_refused(found: dict[str, Any]) -> None:
    for result in found["ranks"]:
        error = result["over"]["error"]
        assert (
            "1 checkpoints of another run, or of an earlier start, the last of step 2" in error
            and "--save-over-others" in error
        )
        assert result["confirmed"]["iteration"] == 1
        assert result["kept"] == ["iter_0000002"]
    assert [each.name for each in complete_checkpoints(found["folder"] / "own")] == [
        "iter_0000001",
        "iter_0000002",
    ]


def test_storage_without_locks_is_said_or_refused(found: dict[str, Any]) -> None:
    assert found["ranks"][0]["unlocked"]["iteration"] == 1
    assert any("nothing keeps a second run from saving" in line for line in found["ranks"][0]["said"])
    for result in found["ranks"]:
        assert "No locks available" in result["strict"]["error"]
