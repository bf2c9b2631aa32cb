"""One run at a time saves to a folder: a lock for the life of the run, and whose checkpoints are there.

    SAVE/run.lock    locked (``flock``) by rank 0 of the run that saves there; host, process and time of it

The lock ends with the process, however it ends. What the file says is for the error of a second run.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mt_megatron.backends.distributed import rendezvous
from mt_megatron.checkpoint import files
from mt_megatron.checkpoint.file_locks import FileLock
from mt_megatron.checkpoint.retention import is_alive
from mt_megatron.checkpoint.run_parts import Job
from mt_megatron.config.schema import CheckpointConfig, TrainingConfig
from mt_megatron.errors import CheckpointError

LOCK = "run.lock"


class RunLock:
    """The lock of a folder that a run saves to, held until ``close``."""

    def __init__(self, directory: Path) -> None:
        """Raises ``CheckpointError`` when another run holds it or the folder cannot be written."""
        files.require_writable(directory)
        path = directory / LOCK
        self.unsupported: str | None = None
        """Why nothing keeps a second run out; None when the lock does."""

        self._lock: FileLock | None = None
        try:
            lock = FileLock(path, create=True)
        except OSError as error:
            self.unsupported = f"{path} cannot be opened: {error.strerror or error}"
            return
        said = lock.holder()
        if lock.state == "busy" or (lock.state == "unsupported" and _runs_here(said)):
            lock.close()
            raise CheckpointError(
                f"another run saves to {directory}: {_words(said)}, by {path}. Two runs in one folder would "
                "replace and remove each other's checkpoints: choose another --save, or end that run first"
            )
        if lock.state == "unsupported":
            self.unsupported = f"its storage has no file locks ({lock.reason})"
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        process = os.getpid()
        holder = {"host": socket.gethostname(), "pid": process, "began": _beginning(process), "since": since}
        _write(lock, (json.dumps(holder) + "\n").encode())
        self._lock = lock

    def close(self) -> None:
        """Let another run save there."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _write(lock, b"")
            lock.close()


def require_free(options: CheckpointConfig) -> None:
    """Raise ``CheckpointError`` as ``held`` would, without keeping the lock: another run saves to the folder,
    or its checkpoints would be written over."""
    directory = Path(str(options.save))
    RunLock(directory).close()
    _require_own(directory, options)


@contextmanager
def held(config: TrainingConfig, job: Job) -> Iterator[list[str]]:
    """The lock of the folder to save to for as long as the run lasts; collective. Yields a note where the
    storage has no locks.

    Raises ``CheckpointError`` on every rank when another run saves there, when the run would start anew or
    continue a checkpoint of elsewhere on top of another run's, or with ``strict`` where there are no locks.
    """
    options = config.checkpoint
    if options.save is None:
        yield []
        return
    directory, mine = Path(options.save), None

    def take() -> str | None:
        nonlocal mine
        mine = RunLock(directory)
        _require_own(directory, options)
        _let_restarts_in(directory)
        return mine.unsupported

    try:
        unsupported: str | None = on_main(job, take)
        note = (
            f"nothing keeps a second run from saving to {directory}: {unsupported}. Start no other run there"
        )
        if unsupported is not None and config.launch.strict:
            raise CheckpointError(f"{note} (--strict)")
        yield [] if unsupported is None else [f"note: {note}"]
    finally:
        if mine is not None:
            mine.close()


def on_main(job: Job, action: Callable[[], Any]) -> Any:
    """What ``action`` returns on rank 0, which alone does it; its error is raised on every rank as a
    ``CheckpointError``. Collective."""
    said: list[tuple[Any, str | None]] = [(None, None)]
    if job.is_main:
        try:
            said = [(action(), None)]
        except (CheckpointError, OSError) as error:
            said = [(None, str(error))]
    dist.broadcast_object_list(said, src=0)
    found, error_text = said[0]
    if error_text is not None:
        raise CheckpointError(error_text)
    return found


def _require_own(directory: Path, options: CheckpointConfig) -> None:
    there = files.complete_checkpoints(directory)
    if options.resume == "auto" or options.save_over_others or not there:
        return
    if options.resume != "never" and (_lies_in(Path(options.resume), directory) or _is_restarted(directory)):
        return
    raise CheckpointError(
        f"{directory} holds {len(there)} checkpoints of another run, or of an earlier start, the last of "
        f"step {files.iteration_of(there[-1])}, and --resume {options.resume} would write over them. Choose "
        "another --save, continue that run with --resume auto, or confirm with --save-over-others"
    )


def _is_restarted(directory: Path) -> bool:
    """True where torchrun started the ranks before and they were let into ``directory``: its checkpoints may
    be this run's own."""
    attempt = rendezvous.attempt()
    if attempt is None or attempt.number == 1:
        # No store of an earlier start: a node's own count is left, which lacks the failures of other nodes.
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    key = _key(directory)
    return bool(attempt.store.check([key])) and int(attempt.store.get(key)) != attempt.number


def _let_restarts_in(directory: Path) -> None:
    """Leave in the launcher's store that this start of the ranks may save to ``directory``."""
    attempt = rendezvous.attempt()
    if attempt is not None and not attempt.store.check([_key(directory)]):
        attempt.store.set(_key(directory), str(attempt.number))


def _key(directory: Path) -> str:
    return f"mt_megatron/saves_to/{directory.resolve()}"


def _lies_in(checkpoint: Path, directory: Path) -> bool:
    """True where ``--resume checkpoint`` is ``directory`` or one of its folders. No folder is read, as a kill
    may have left them in disorder."""
    if files.iteration_of(checkpoint) is None:
        return checkpoint.resolve() == directory.resolve()
    return directory.resolve() in (checkpoint.parent.resolve(), checkpoint.resolve().parent)


def _write(lock: FileLock, content: bytes) -> None:
    # The lock is what counts, and a full disk does not keep it from being held.
    with suppress(OSError):
        lock.write(content)


def _runs_here(said: dict[str, object]) -> bool:
    process = said.get("pid")
    if said.get("host") != socket.gethostname() or not isinstance(process, int) or not is_alive(process):
        return False
    # Its number may be another's by now: a container that starts again counts from 1 again.
    began, now = said.get("began"), _beginning(process)
    return began is None or now is None or began == now


def _beginning(process: int) -> int | None:
    """When a process of this host began, in ticks since the host did; None where that is not known."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        # The name of the program comes before it, in parentheses, and may hold anything.
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _words(said: dict[str, object]) -> str:
    if not said:
        return "it does not say which"
    return f"process {said.get('pid')} on host {said.get('host')}, since {said.get('since')}"
