"""One job at a time fills an index cache, and what a killed job left half written is made anew.

Megatron-Core takes an index for whole as soon as its files exist, and writes them in place. So a job that
starts while another writes the same index, or after one that was killed at it, would read a part.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import IO

logger = logging.getLogger("mt_megatron")

_LOCK = ".building"


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Around the building of an index in ``folder``, on the one rank that may write it.

    Waits as long as another process is at it, and removes first what one that was killed had begun to
    write. A folder that cannot be written, or storage without locks, is used as it is: the second is said.
    """
    with contextlib.ExitStack() as stack:
        lock = _opened(folder)
        if lock is not None:
            stack.enter_context(lock)
            if _locked(lock, folder):
                _remove_what_was_begun(lock, folder)
                _write(lock, json.dumps(sorted(_files(folder))))
                # Only after a build that went well: one that failed may have left a part as well.
                yield
                _write(lock, "")
                return
        yield


def _opened(folder: Path) -> IO[str] | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / _LOCK, "a+", encoding="utf-8")
    except OSError:
        # This user writes nothing here; one who may is not waited for. What is missing, Megatron says.
        return None


def _locked(lock: IO[str], folder: Path) -> bool:
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another job writes the index cache %s; waiting until it has ended", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        logger.warning(
            "the storage of the index cache %s has no file locks (%s): let no two jobs with the same data "
            "start at once",
            folder,
            error,
        )
        return False
    return True


def _remove_what_was_begun(lock: IO[str], folder: Path) -> None:
    """Whoever held the lock last and left a list was killed: what is not on it, that process wrote.

    Other jobs may still open what is on the list, and have never seen the rest as a whole.
    """
    lock.seek(0)
    text = lock.read()
    if not text:
        return
    try:
        before = set(json.loads(text))
    except (ValueError, TypeError):
        before = set()
    begun = _files(folder) - before
    for name in begun:
        (folder / name).unlink(missing_ok=True)
    if begun:
        logger.warning(
            "an earlier job ended while it wrote the index cache %s; its %d files are made anew",
            folder,
            len(begun),
        )


def _files(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir() if each.name != _LOCK}


def _write(lock: IO[str], text: str) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()
