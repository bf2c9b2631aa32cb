"""A conversion that was killed goes on where it was, and what it left half-done or damaged is made anew."""

from __future__ import annotations

import errno
import json
import os
import random
import sys
from pathlib import Path

import pytest

from mt_megatron.checkpoint import file_locks
from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.convert.folders import RECORD
from mt_megatron.convert.output_folder import JOURNAL, SCRATCH, OutputFolder
from mt_megatron.errors import CheckpointError
from tests.convert import published
from tests.convert.published import differing, read
from tests.convert.recorded_run import Quiet, converted
from tests.launch import ROOT, run_command
from tests.nfs_locks import flock_of_nfs, flock_that_fails


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "llama"
    published.write(folder, "llama", published.draw("llama", random.Random(0)), seed=0)
    return folder


def killed(source: Path, destination: Path, form: str, after: int) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.convert.kill"]
    done = run_command(
        [*command, str(source), str(destination), form, str(after)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 9, done.stderr


@pytest.mark.parametrize("form", ["huggingface", "torch_dist"])
def test_goes_on_where_it_was(source: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    for after in (1, 15, 35) if form == "huggingface" else (1, 45, 70):
        killed(source, out, form, after)
        assert not out.is_dir() or not list(out.glob("iter_*")), "nothing has its name before it is whole"
    [left] = tmp_path.rglob(".*.converting")
    lines = [json.loads(line) for line in (left / "journal").read_text().splitlines()[1:]]
    whole = sorted(each["file"] for each in lines if each["file"].endswith((".safetensors", ".distcp")))
    assert whole, "some files are complete"
    times = {name: (left / name).stat().st_mtime_ns for name in whole}
    # One of them was damaged meanwhile.
    spoiled = left / whole[0]
    content = bytearray(spoiled.read_bytes())
    content[-1] ^= 1
    spoiled.write_bytes(content)
    progress = Quiet()
    outcome = converted(source, out, form, max_shard_size=30_000, progress=progress, workers=2)
    assert any("taking up" in line for line in progress.lines)
    for name in whole[1:]:
        assert (outcome.folder / name).stat().st_mtime_ns == times[name], "complete files are kept"
    assert not list(tmp_path.rglob(".*.converting")) and not list(tmp_path.rglob("*.part"))
    final = out
    if form == "torch_dist":
        final = tmp_path / "back"
        converted(out, final, "huggingface")
    assert differing(read(final), read(source)) == []


def test_scratch_of_a_kill_is_not_published(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out", "work", print) as output:
        (output.folder / f"{SCRATCH}abcd").mkdir()
        (output.folder / f"{SCRATCH}abcd" / "0").write_bytes(b"x")
    with OutputFolder(tmp_path / "out", "work", print) as output:
        output.write_text("file", "x")
        output.publish()
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [RECORD, "file"]


@pytest.mark.parametrize("form", ["huggingface", "torch_dist"])
def test_a_whole_result_that_a_kill_left_gets_its_name(
    source: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill when the journal is gone and the name is not there yet."""

    def killed_here(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", killed_here)
        converted(source, tmp_path / "out", form)
    [left] = tmp_path.rglob(".*.converting")
    assert (left / RECORD).is_file() and not (left / JOURNAL).exists()
    times = {each.name: each.stat().st_mtime_ns for each in left.iterdir()}
    with pytest.raises(CheckpointError, match="remove it"):
        converted(source, tmp_path / "out", form, dtype="fp32")  # Other work.
    progress = Quiet()
    made = converted(source, tmp_path / "out", form, progress=progress)
    assert any("holds the whole result" in line for line in progress.lines)
    assert {each.name: each.stat().st_mtime_ns for each in made.folder.iterdir()} == times
    assert made.bytes == converted(source, tmp_path / "out", form).bytes
    assert not list(tmp_path.rglob(".*.converting*"))


def test_a_place_that_was_taken_meanwhile_costs_nothing(tmp_path: Path) -> None:
    final = tmp_path / "out"
    with OutputFolder(final, "work", print) as output:
        output.write_text("file", "x")
        (final / "theirs").mkdir(parents=True)
        with pytest.raises(CheckpointError, match="no longer empty"):
            output.publish()
    (final / "theirs").rmdir()
    with OutputFolder(final, "work", print) as output:
        written = (output.folder / "file").stat().st_mtime_ns
        output.write_text("file", "x")
        output.publish()
    assert sorted(each.name for each in final.iterdir()) == [RECORD, "file"]
    assert (final / "file").stat().st_mtime_ns == written


def test_other_work_is_not_taken_up(source: Path, tmp_path: Path) -> None:
    killed(source, tmp_path / "out", "huggingface", 25)
    progress = Quiet()
    converted(source, tmp_path / "out", "huggingface", dtype="fp32", progress=progress)
    assert any("left by another conversion: starting anew" in line for line in progress.lines)
    assert all(str(tensor.dtype) == "torch.float32" for tensor in read(tmp_path / "out").values())


def test_a_strange_folder_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.converting").mkdir()
    (tmp_path / ".out.converting" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="remove it"):
        converted(source, tmp_path / "out", "huggingface")
    assert (tmp_path / ".out.converting" / "mine").exists()


@pytest.mark.parametrize("nfs", [False, True], ids=["local", "nfs"])
def test_two_at_once_are_refused(
    source: Path, tmp_path: Path, nfs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nfs:
        monkeypatch.setattr(file_locks.fcntl, "flock", flock_of_nfs)
    lock = FileLock(tmp_path / ".out.converting.lock", create=True)
    with pytest.raises(CheckpointError, match="another process"):
        converted(source, tmp_path / "out", "huggingface")
    lock.close()
    converted(source, tmp_path / "out", "huggingface")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_storage_without_locks_is_said(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks.fcntl, "flock", flock_that_fails(errno.ENOLCK))
    progress = Quiet()
    converted(source, tmp_path / "out", "huggingface", progress=progress)
    assert any("No locks available" in line for line in progress.lines)
