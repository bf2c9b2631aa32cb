"""One run at a time records to a folder: files, commands and the page there are those of one run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Callable

from mt_megatron.checkpoint.file_locks import FileLock, is_own
from mt_megatron.errors import ScopeError
from mt_megatron.scan.format.permissions import make_private_folder

from .files import ScopeFiles


def hold(files: ScopeFiles, say: Callable[[str], None]) -> Callable[[], None]:
    """Make ``files.root``, and keep other processes' runs out of it until the result is called or this
    process ends. On storage without locks nothing is kept out, which ``say`` hears.

    Raises ``ScopeError`` for a folder that cannot be written, or that a run of another process holds.
    """
    try:
        make_private_folder(files.root)
        if not os.access(files.root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(files.root))
        lock = FileLock(files.lock, create=True)
    except OSError as error:
        raise ScopeError(
            f"{files.root} cannot be written ({error}); expected a folder that this user may write. Set "
            "--scope-dir to another one"
        ) from error
    if lock.state == "held":
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        with contextlib.suppress(OSError):  # A full disk does not keep the lock from being held.
            lock.write(json.dumps(about).encode())
        return lock.close
    with lock:
        holder = lock.holder()
    if lock.state == "busy" and not is_own(files.lock):
        raise ScopeError(
            f"another run records to {files.root}: process {holder.get('pid', 'unknown')} on host "
            f"{holder.get('host', 'unknown')}, since {holder.get('since', 'unknown')}; expected a folder of "
            "its own for each run. Set --scope-dir to another one, or end that run first"
        )
    if lock.state == "unsupported":
        say(
            f"scope: nothing keeps a second run from recording to {files.root}: its storage has no file "
            f"locks ({lock.reason}). Start no other run there"
        )
    return lambda: None
