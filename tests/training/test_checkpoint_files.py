"""Which checkpoint is found, and what is said about one that is not whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_megatron.errors import CheckpointError
from mt_megatron.training.checkpoint import (
    LATEST,
    MANIFEST,
    latest_checkpoint,
    read_manifest,
    resolve_checkpoint,
    write_durably,
)


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
