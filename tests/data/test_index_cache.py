"""Jobs that share an index cache take turns; what a killed one had begun is made anew and nothing else."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_megatron.config.schema import DataConfig
from mt_megatron.data.loader.datasets import build_datasets, filling, order_fingerprint
from mt_megatron.data.loader.tokenizer import NullTokenizer
from tests.data.test_datasets import LENGTH, VOCABULARY, write_indexed
from tests.launch import ROOT


def build(cache: Path) -> Any:
    """The training dataset of ``corpus``, beside the cache."""
    # Megatron's mock data has one size, whose indices take seconds.
    corpus = cache.parent / "corpus"
    if not corpus.with_suffix(".idx").exists():
        write_indexed(corpus, 400)
    return build_datasets(
        DataConfig(data_path=(str(corpus),), split="80,10,10"),
        tokenizer=NullTokenizer(VOCABULARY),
        sequence_length=LENGTH,
        train_samples=4,
        valid_samples=4,
        seed=1,
        cache_dir=cache,
    ).train


_DIES_WRITING = """
import os, signal, sys
from pathlib import Path
import numpy as np
from tests.data.test_index_cache import build

save = np.save
def stops(path, array, **options):
    if "valid" in str(path) and "shuffle" in str(path):
        with open(path, "wb") as file:
            file.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    save(path, array, **options)
np.save = stops
build(Path(sys.argv[1]))
"""


def test_what_a_killed_job_had_begun_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = order_fingerprint(build(tmp_path / "whole"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _DIES_WRITING, str(tmp_path / "cache")],
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "cache").iterdir()
    assert [each for each in folder.iterdir() if each.read_bytes() == b"half"]
    with caplog.at_level(logging.WARNING, logger="mt_megatron"):
        again = build(tmp_path / "cache")
    assert order_fingerprint(again) == whole and again.built_anew_on_cache_miss
    assert "8 files are made anew" in caplog.text
    assert not build(tmp_path / "cache").built_anew_on_cache_miss


def test_without_a_turn_a_part_is_read(tmp_path: Path) -> None:
    """What this guards against is real: Megatron takes a part for the whole."""
    build(tmp_path)
    (folder,) = tmp_path.iterdir()
    (part,) = [each for each in folder.iterdir() if "train-shuffle" in each.name]
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(Exception, match="failed to build|could not build"):
        build(tmp_path)


def test_only_what_the_killed_one_wrote_is_removed(tmp_path: Path) -> None:
    (tmp_path / "old.npy").write_text("old")
    with pytest.raises(KeyboardInterrupt), filling(tmp_path):
        (tmp_path / "new.npy").write_text("part")
        raise KeyboardInterrupt
    assert json.loads((tmp_path / ".building").read_text()) == ["old.npy"]
    with filling(tmp_path):
        assert sorted(os.listdir(tmp_path)) == [".building", "old.npy"]
        (tmp_path / "new.npy").write_text("whole")
    assert (tmp_path / ".building").read_text() == ""
    with filling(tmp_path):
        assert (tmp_path / "new.npy").read_text() == "whole"


def test_a_list_that_cannot_be_read_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_text("?")
    (tmp_path / ".building").write_text('["a.n')
    with filling(tmp_path):
        assert os.listdir(tmp_path) == [".building"]


def test_two_take_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inside, seen = threading.Event(), []

    def other() -> None:
        with filling(tmp_path):
            inside.set()
            deadline = time.monotonic() + 60
            while "waiting" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
            (tmp_path / "index.npy").write_text("whole")

    with caplog.at_level(logging.WARNING, logger="mt_megatron"):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(60)
        with filling(tmp_path):
            seen = [each.name for each in tmp_path.glob("*.npy")]
        thread.join()
    assert seen == ["index.npy"] and "another job writes the index cache" in caplog.text


def test_storage_that_says_eacces_of_a_busy_lock_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some NFS says it of a lock that another host holds, which is not storage without locks."""
    asked: list[int] = []

    def busy(descriptor: object, operation: int) -> None:
        asked.append(operation)
        if len(asked) < 3:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("mt_megatron.data.loader.datasets.fcntl.flock", busy)
    with caplog.at_level(logging.WARNING, logger="mt_megatron"), filling(tmp_path):
        assert json.loads((tmp_path / ".building").read_text()) == []
    assert len(asked) == 3 and all(each & fcntl.LOCK_NB for each in asked)
    assert caplog.text.count("another job writes") == 1 and "no file locks" not in caplog.text


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = order_fingerprint(build(tmp_path))

    def refuse(self: Path, *args: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    # Who runs the tests may be root, whom no mode keeps out.
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert order_fingerprint(build(tmp_path)) == whole


def test_storage_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING, logger="mt_megatron"):
        assert np.asarray(build(tmp_path).shuffle_index).size
    assert "no file locks" in caplog.text
