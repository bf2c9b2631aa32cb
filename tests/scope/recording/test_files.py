"""Bookmarks up to their bound, and files from before it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest

from mt_megatron.errors import ScopeError
from mt_megatron.scan.drill.load import write_for
from mt_megatron.scan.format.permissions import make_private_folder, open_private, set_group_readable
from mt_megatron.scan.format.run_files import run_files
from mt_megatron.scan.record.control import change_control, read_control
from mt_megatron.scan.respond.straggler_policy import Exclusion, exclude
from mt_megatron.scope.recording import files as module
from mt_megatron.scope.recording.files import (
    LONGEST_BOOKMARK,
    MOST_CHARACTERS,
    ScopeFiles,
    add_bookmark,
    keeps_shared_memory,
    read_bookmarks,
    read_requests,
    scope_files,
    write_requests,
)
from mt_megatron.scope.recording.lock import hold
from mt_megatron.scope.recording.schema import connect_writer

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


def bookmarked(run: Path, number: int) -> None:
    add_bookmark(scope_files(run), number, "here")


def asked(run: Path, number: int) -> None:
    write_requests(scope_files(run), [f"mlp@decoder.layers.{number}"], add=True)


def controlled(run: Path, number: int) -> None:
    change_control(run_files(run), {str(number): True})


def excluded(run: Path, number: int) -> None:
    exclude(run_files(run), Exclusion(host=f"host{number}", ranks=(number,), cause="slow", reason="slow"))


CHANGES: dict[Callable[[Path, int], None], Callable[[Path], int]] = {
    bookmarked: lambda run: len(read_bookmarks(scope_files(run))),
    asked: lambda run: len(read_requests(scope_files(run))),
    controlled: lambda run: len(read_control(run_files(run).control)),
    excluded: lambda run: len((run / "scan" / "excluded-hosts").read_text().splitlines()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_acknowledged_stays(tmp_path: Path, change: Callable[[Path, int], None]) -> None:
    """Eight writers at once, as the page, its neighbours and the command line are."""
    for name in ("scan", "scope"):
        (tmp_path / name).mkdir()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: change(tmp_path, number), range(48)))
    assert CHANGES[change](tmp_path) == 48


OPENED: dict[str, Callable[[Path], object]] = {
    "folder": make_private_folder,
    "folder of a trace": lambda path: set_group_readable(path, True),
    "lock of a run": lambda path: hold(ScopeFiles(path), print),
    "appended": lambda path: open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    "recording": connect_writer,
    "scratch": lambda path: write_for(0.01, path),
    "mark": lambda path: set_group_readable(path.parent, True),
}


@pytest.mark.parametrize("place", OPENED)
@pytest.mark.parametrize("kind", ["folder", "file", "nowhere"])
def test_links_are_not_followed(tmp_path: Path, place: str, kind: str) -> None:
    """In a folder that others may write a link would change files that are this user's alone."""
    target = tmp_path / "target"
    if kind == "folder":
        target.mkdir(mode=0o750)
        (target / "mine").write_text("mine")
        (target / "mine").chmod(0o600)
    elif kind == "file":
        target.write_text("mine")
        target.chmod(0o600)
    (tmp_path / "inner").mkdir()
    link = tmp_path / "inner" / ".group-readable" if place == "mark" else tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises((OSError, ScopeError)):
        OPENED[place](link)
    assert target.exists() == (kind != "nowhere")
    if kind == "file":
        assert target.read_text() == "mine" and target.stat().st_mode & 0o777 == 0o600
    elif kind == "folder":
        assert os.listdir(target) == ["mine"] and (target / "mine").stat().st_mode & 0o777 == 0o600


def test_modes_of_a_trace_are_not_given_to_the_target_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "key").write_text("secret")
    (tmp_path / "home" / "key").chmod(0o600)
    (tmp_path / "scan").mkdir(mode=0o700)
    (tmp_path / "scan" / "rank-00001").symlink_to(tmp_path / "home")
    set_group_readable(tmp_path / "scan", True)
    assert (tmp_path / "home" / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_in_place_of_bookmarks_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    files = scope_files(tmp_path)
    files.root.mkdir()
    if kind == "pipe":
        os.mkfifo(files.bookmarks)
    else:
        files.bookmarks.symlink_to("/dev/zero")
    with pytest.raises((ScopeError, OSError)):
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
