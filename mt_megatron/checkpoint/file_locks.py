"""Advisory locks on files (``flock``), also on storage that gives them in its own way or not at all.

NFS gives an exclusive lock only to a descriptor that is open for writing, and some storage has no locks.
Neither may look like a lock that nobody holds: a caller is told which of the three it met.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import weakref
from pathlib import Path
from types import TracebackType
from typing import Literal

BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""Errors of a lock that another process holds; some NFS says EACCES."""

_held: weakref.WeakSet[FileLock]

GONE = (errno.ENOENT, errno.ESTALE)
"""Errors of a file that another process has removed or replaced; NFS also says ESTALE."""


class FileLock:
    """A lock on ``path`` for as long as the object is open. A context: its end lets go of the lock.

    Processes that are forked meanwhile (workers of a data loader) do not inherit it: it ends with the
    process that took it, however that ends.
    """

    _descriptor = -1

    def __init__(
        self,
        path: Path,
        *,
        shared: bool = False,
        create: bool = False,
        wait: bool = False,
        mode: int = 0o666,
    ) -> None:
        """Takes the lock, at once or, with ``wait``, when other processes have let go of it; ``state`` says
        whether that succeeded. ``create``: makes the file where there is none, with ``mode``, and follows
        no link. Raises ``OSError`` when ``path`` cannot be opened."""
        self.path = path
        self.state: Literal["held", "busy", "unsupported"] = "held"
        """``busy``: another process holds it. ``unsupported``: the storage gives no lock, see ``reason``."""

        self.reason = ""
        # An exclusive lock on NFS needs a descriptor that is open for writing.
        flags = (os.O_RDONLY if shared else os.O_RDWR) | (os.O_CREAT | os.O_NOFOLLOW if create else 0)
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
        _held.add(self)
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(self._descriptor, kind if wait else kind | fcntl.LOCK_NB)
        except OSError as error:
            self.state = "busy" if error.errno in BUSY else "unsupported"
            self.reason = error.strerror or str(error)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def read(self) -> bytes:
        """What the file holds."""
        return os.pread(self._descriptor, 1 << 16, 0)

    def holder(self) -> dict[str, object]:
        """The JSON object that the file holds, which its holder wrote; empty where there is none."""
        try:
            said = json.loads(self.read())
        except ValueError:
            return {}
        return said if isinstance(said, dict) else {}

    def write(self, content: bytes) -> None:
        """Replace what the file holds; for a lock that is not shared."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)

    def names_the_file(self) -> bool:
        """Whether ``path`` still is the file that is locked, not removed or replaced by another process."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError as error:
            if error.errno not in GONE:
                raise
            return False

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the lock; a second time does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        _held.discard(self)
        if descriptor >= 0:
            os.close(descriptor)


_held = weakref.WeakSet()


def is_own(path: Path) -> bool:
    """True where this process holds the lock on ``path``. Host and process number in a file do not say so:
    two containers with the machine's host name may have the same."""
    return any(each.state == "held" and each.path.resolve() == path.resolve() for each in list(_held))


def _in_a_fork() -> None:
    # A lock lasts as long as any process has the descriptor: one that outlives its trainer keeps it.
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_in_a_fork)
