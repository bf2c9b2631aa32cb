"""Runs torchrun and hands on the signals that ask training to save and end.

torchrun itself ends at SIGUSR1 and, at SIGTERM, gives its processes half a minute. Training saves and
ends by itself at either signal, in the time that it needs, and torchrun ends after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from mt_megatron.backends.loader_workers import TEMPORARY_FOLDER

_HANDED_ON = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_LOOK_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


def supervise(command: Sequence[str], environment: Mapping[str, str], *, when_terminated: int = 0) -> int:
    """Run ``command`` (torchrun's) to its end and return its exit code, or ``when_terminated`` in the
    place of 0 after SIGTERM.

    SIGUSR1 goes to the processes that torchrun started, once all of them listen for it. SIGTERM and
    SIGINT go there as SIGTERM if they listen, else to torchrun; a second one goes to torchrun always.
    Temporary files of torchrun and of loader workers go to a folder that ends with it.
    """
    waiting: list[int] = []
    # torchrun never removes its folder of logs, and a process that is killed none of its own.
    folder = tempfile.TemporaryDirectory(prefix="mtlaunch-", ignore_cleanup_errors=True)
    environment = {"PET_LOG_DIR": folder.name, **environment, TEMPORARY_FOLDER: folder.name}
    before = {number: signal.signal(number, _Note(waiting)) for number in _HANDED_ON}
    # A session of its own: Ctrl-C in a terminal must not reach torchrun past this process.
    process = subprocess.Popen(
        list(command), env=environment, start_new_session=True, preexec_fn=_in_torchrun
    )
    try:
        return _watch(process, waiting, when_terminated)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        folder.cleanup()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Note:
    def __init__(self, waiting: list[int]) -> None:
        self._waiting = waiting

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append(number)


def _watch(process: subprocess.Popen[bytes], waiting: list[int], when_terminated: int) -> int:
    ends, terminated = 0, False
    while True:
        code = process.poll()
        if code == 0 and (terminated or signal.SIGTERM in waiting):
            return when_terminated
        if code is not None:
            return 128 - code if code < 0 else code
        held: list[int] = []
        while waiting:
            number = waiting.pop(0)
            ends += number != signal.SIGUSR1
            terminated |= number == signal.SIGTERM
            if not _hand_on(process, number, insist=ends > 1):
                held.append(number)
        waiting.extend(held)
        time.sleep(_LOOK_SECONDS)


def _hand_on(process: subprocess.Popen[bytes], number: int, *, insist: bool) -> bool:
    """False when the signal has to wait until training listens."""
    wanted = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
    workers = _workers(process.pid)
    listen = bool(workers) and all(_listens(worker.pid, wanted) for worker in workers)
    if wanted == signal.SIGUSR1 and not listen:
        return False
    if not listen and not insist:
        _say(
            f"{signal.Signals(number).name}: not every training process listens for it (before the first "
            "step, or after the last): all end, and no checkpoint is written"
        )
    if not listen or insist:
        process.terminate()
        return True
    _say(f"{wanted.name} for {len(workers)} training processes: they save and end")
    for worker in workers:
        _send(worker, wanted)
    return True


def _workers(pid: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(pid).children()
        return [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def _listens(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own; one without it would be ended by the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _send(worker: psutil.Process, number: signal.Signals) -> None:
    # It may have ended meanwhile, which is what it was to do.
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.send_signal(number)


def _in_torchrun() -> None:
    """In the child: SIGTERM when this process dies, so that SIGKILL leaves no torchrun behind.

    torchrun leaves SIGUSR1 at its default, which is the end of it; Slurm may send it to every process.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _say(text: str) -> None:
    print(f"mt-megatron launch: {text}", file=sys.stderr, flush=True)
