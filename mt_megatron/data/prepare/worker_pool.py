"""Worker processes that are told when to work, watched while they do, and gone when we are."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from mt_megatron.errors import DataError

_MODULE = "mt_megatron.data.prepare.encode_worker"
_ROOT = Path(__file__).resolve().parents[3]
_GRACE_SECONDS = 2.0


class Task(NamedTuple):
    """One shard to make."""

    name: str
    """Of its files."""

    message: dict[str, Any]
    """What the worker is told."""


class _Worker:
    def __init__(self, number: int, setup: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        path = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        # One thread each: there are as many workers as cores.
        threads = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.number = number
        self.process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))},
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.task: Task | None = None
        self.send(setup)

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise self.died() from None

    def died(self) -> DataError:
        """The error of a worker that is no longer there, naming it and how it ended."""
        try:
            code = self.process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        at = (
            f"while it made shard {self.task.name} of {_files(self.task)}" if self.task else "when it started"
        )
        memory = "Look for the kernel's out-of-memory killer and use fewer --workers. " * (code == -9)
        return DataError(
            f"worker {self.number} (process {self.process.pid}) {how} {at}. {memory}What is done is "
            "kept: run the same command again to continue"
        )


def run_tasks(
    tasks: Iterator[Task],
    setup: dict[str, Any],
    *,
    workers: int,
    on_done: Callable[[str, dict[str, Any]], None],
) -> None:
    """Give ``tasks`` to ``workers`` processes, one each at a time, and ``on_done`` every result.

    ``tasks`` is asked for the next one only when a worker is free, so it may depend on results. When
    this returns or raises, no worker is left.

    Raises ``DataError`` when a worker dies, naming it, or tells of an error that stops the work.
    """
    pool: list[_Worker] = []
    try:
        waiting = next(tasks, None)
        if waiting is None:
            return
        for number in range(workers):
            pool.append(_Worker(number, setup))
        busy = {worker.connection: worker for worker in pool}
        while busy:
            for ready in wait(list(busy)):
                worker = busy[ready]  # type: ignore[index]
                answer = _answer(worker)
                if "summary" in answer:
                    on_done(answer["name"], answer["summary"])
                waiting = waiting or next(tasks, None)
                worker.task, waiting = waiting, None
                if worker.task is None:
                    del busy[worker.connection]
                else:
                    worker.send(worker.task.message)
    finally:
        _end(pool)


def _answer(worker: _Worker) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        raise worker.died() from None
    if "failed" not in answer:
        return answer
    told = str(answer["failed"])
    if answer.get("code") in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        told = f"the disk is full or a limit on files was met: {told}. Free space, and"
    elif answer["expected"]:
        told = f"{told}. Then"
    else:
        told = (
            f"worker {worker.number} failed:\n{told}This is a mistake in mt_megatron; please report it. Then"
        )
    raise DataError(f"{told} run the same command again: it continues with what is done")


def _end(pool: list[_Worker]) -> None:
    for worker in pool:
        worker.connection.close()
    for worker in pool:
        try:
            # Between two shards it ends by itself; within one there is nothing to keep.
            worker.process.wait(0.05 if worker.task else _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def _files(task: Task) -> str:
    files = task.message["unit"]["files"]
    return str(files[0]["path"]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
