"""Modes of a trace's files: for their owner alone (0700 and 0600), or for the group too (0750 and 0640).

Folders and files are opened by their own names, never through a symbolic link: in a folder that others may
write, a link would have this user's files elsewhere changed.

A mark in the trace's folder says which, so that every process that makes a file there later (the watcher,
``scan report``, ``scan sql``) follows the run's option. An explicit option is above the umask: modes are set
after a file was made. The set-group-ID bit of a folder stays, so that new files keep its group.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

MARK = ".group-readable"
"""In the trace's folder: its group may read everything below it."""

_DEPTH = 3
"""Folders of a trace lie at most so deep below its own: ``store/spans/`` holds files."""

_GROUP_FOLDER, _GROUP_FILE = 0o050, 0o040
_NOT_OTHERS = ~0o027


def set_group_readable(root: Path, readable: bool, own: Callable[[str], bool] = lambda _: True) -> bool:
    """Open the trace in ``root`` to its group, with what is there of it, or close it again.

    Every rank calls it; ``own`` tells by their names which entries of ``root`` are this one's to change, so
    that 1,024 ranks do not each visit all of them. Returns whether the group may read ``root`` now: a file
    system may have modes of its own. Raises ``OSError`` when ``root`` or the mark in it cannot be made.
    """
    make_private_folder(root)
    mark = root / MARK
    if readable:
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    elif not mark.exists():
        return False  # the user who made the folder with other modes has decided about them
    # What the root holds follows before it opens, and after it closes.
    if not readable:
        _set(root, False)
    for entry in sorted(root.iterdir()):
        if own(entry.name):
            _set_below(entry, readable)
    if readable:
        _set(root, True)
    elif own(MARK):
        mark.unlink(missing_ok=True)
    return root.stat().st_mode & _GROUP_FOLDER == _GROUP_FOLDER


def group_may_read(path: Path) -> bool:
    """Whether ``path`` lies in a trace that is open to its group."""
    folder = path if path.is_dir() else path.parent
    return any((each / MARK).exists() for each in (folder, *folder.parents)[: _DEPTH + 1])


def grant(path: Path) -> None:
    """Give ``path``, which was just made, the modes of its trace. One of somebody else stays as it is."""
    if group_may_read(path):
        _set(path, True)


def make_private_folder(path: Path) -> None:
    """``path`` where it has to be made, for its owner alone unless its trace is open to the group; its
    parents as the process makes folders. Raises ``OSError``, also where ``path`` is a symbolic link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        grant(path)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "found a link or a file, expected a folder", str(path))


def open_private(path: Path, flags: int) -> int:
    """``os.open`` of a file that is made where there is none, with the modes of its trace. Raises
    ``OSError``, also where ``path`` is a symbolic link."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    grant(path)
    return file


def grant_below(folder: Path) -> None:
    """Give ``folder`` and everything in it the modes of its trace."""
    if group_may_read(folder):
        _set_below(folder, True)


def _set_below(folder: Path, readable: bool) -> None:
    if folder.is_symlink():
        return  # ``os.walk`` follows the first one
    # Contents first: a folder opens when what it holds has.
    for inside, folders, files in os.walk(folder):
        for name in (*folders, *files):
            _set(Path(inside, name), readable)
    _set(folder, readable)


def _set(path: Path, readable: bool) -> None:
    # Files come and go while ranks start, and not every file system keeps modes.
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid():
            return
        mode = stat.S_IMODE(found.st_mode)
        more = _GROUP_FOLDER if stat.S_ISDIR(found.st_mode) else _GROUP_FILE
        wanted = (mode & _NOT_OTHERS) | more if readable else mode & ~0o077
        if wanted != mode:
            os.chmod(path, wanted)
