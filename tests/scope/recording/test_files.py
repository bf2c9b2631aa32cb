"""Bookmarks up to their bound, and files from before it."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest

from mt_megatron.errors import ScopeError
from mt_megatron.scope.recording import files as module
from mt_megatron.scope.recording.files import (
    LONGEST_BOOKMARK,
    MOST_CHARACTERS,
    ScopeFiles,
    add_bookmark,
    keeps_shared_memory,
    read_bookmarks,
    scope_files,
)

LONG = "步" * LONGEST_BOOKMARK


def full(files: ScopeFiles) -> int:
    """Marks of the longest Chinese texts, as many as fit; how many."""
    files.root.mkdir()
    rows = [{"step": step, "text": LONG, "time_unix": 1.79e9 + step} for step in range(2_000)]
    size = len(json.dumps(rows[:1], indent=1, ensure_ascii=False))
    count = MOST_CHARACTERS // size
    files.bookmarks.write_text(json.dumps(rows[:count], ensure_ascii=False), encoding="utf-8")
    return count


def test_a_mark_too_many_is_refused_and_the_others_stay(tmp_path: Path) -> None:
    files = scope_files(tmp_path)
    count = full(files)
    assert count > 900 and len(read_bookmarks(files)) == count
    added = 0
    refused = r"found \d+ bookmarks of [\d,]+ characters; expected at most 262,144"
    with pytest.raises(ScopeError, match=refused):
        for added in range(100):
            add_bookmark(files, 5_000 + added, LONG)
    found = read_bookmarks(files)
    assert len(found) == count + added and {each.text for each in found} == {LONG}
    text = files.bookmarks.read_text(encoding="utf-8")
    assert len(text) <= MOST_CHARACTERS and LONG in text


def test_a_file_that_escapes_made_longer_than_the_bound_is_read(tmp_path: Path) -> None:
    """As it was written before: one mark too many, and none could be read."""
    files = scope_files(tmp_path)
    files.root.mkdir()
    rows = [{"step": step, "text": LONG, "time_unix": 1.79e9 + step} for step in range(220)]
    files.bookmarks.write_text(json.dumps(rows, indent=1))
    assert files.bookmarks.stat().st_size > MOST_CHARACTERS and len(read_bookmarks(files)) == 220
    add_bookmark(files, 500, LONG)
    assert files.bookmarks.stat().st_size < MOST_CHARACTERS and len(read_bookmarks(files)) == 221


def test_a_file_beyond_the_bound_is_named_with_it(tmp_path: Path) -> None:
    files = scope_files(tmp_path)
    files.root.mkdir()
    files.bookmarks.write_text(" " * 5 * MOST_CHARACTERS)
    with pytest.raises(ScopeError, match="found more than 1,048,576 characters; expected at most 262,144"):
        read_bookmarks(files)


@pytest.mark.parametrize("name", ["plain", "数据", "with blank"])
def test_a_network_mount_of_any_name_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    escaped = str(folder).replace(" ", "\\040")
    lines = f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / {escaped} rw - nfs4 host:/x rw\n"
    monkeypatch.setattr(module, "open", lambda *_, **__: StringIO(lines), raising=False)
    assert keeps_shared_memory(tmp_path) and not keeps_shared_memory(folder)
