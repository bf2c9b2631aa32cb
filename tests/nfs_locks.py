"""``flock`` as NFS answers it: an exclusive lock needs a descriptor for writing, a shared one for reading."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

_real = fcntl.flock


def flock_of_nfs(descriptor: int, operation: int) -> None:
    """In place of ``fcntl.flock``; a local lock where NFS would give one."""
    mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    if (operation & fcntl.LOCK_EX and mode == os.O_RDONLY) or (
        operation & fcntl.LOCK_SH and mode == os.O_WRONLY
    ):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    _real(descriptor, operation)


def flock_that_fails(number: int) -> Callable[[int, int], None]:
    """In place of ``fcntl.flock`` on storage without locks."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock
