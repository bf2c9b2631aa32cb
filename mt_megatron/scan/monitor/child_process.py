"""Child process beside a rank: in a session of its own, its lines relayed, ended in time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that the child does not inherit: it is no rank."""


_HELD = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


def start_child(
    command: Sequence[str], variables: Mapping[str, str] | None = None, *, held: Collection[int] = ()
) -> subprocess.Popen[bytes]:
    """Start ``command`` with one thread for OpenMP, ``variables`` in its environment, and its error output as
    a pipe. Signals that a scheduler sends to a whole job, and those ``held``, wait until the child calls
    ``hear_signals``: sent while its interpreter starts they would end it. Raises ``OSError``."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_HELD, *held})
    try:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**environment, "OMP_NUM_THREADS": "1", **(variables or {})},
            # A session of its own: Ctrl-C at the terminal reaches the training, which ends it.
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_signals(*held: int) -> None:
    """In the child, once its handlers are there: take the signals that have waited since its start."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_HELD, *held})


def relay_lines(process: subprocess.Popen[bytes], say: Callable[[str], None]) -> None:
    """Give ``say`` each line of the error output of ``process`` until it is closed."""
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            say(line.decode(errors="replace").rstrip())


def end_child(process: subprocess.Popen[bytes], seconds: float, by: int = signal.SIGTERM) -> None:
    """Ask ``process`` to end by the signal ``by``; after ``seconds`` kill it."""
    process.send_signal(by)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def is_alive(pid: int) -> bool:
    """True where process ``pid`` runs, as a child asks of its parent; one that has ended and was not waited
    for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        # A process that has ended stays in the table until its parent waits for it, in a container for ever.
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        return state.split()[0] != "Z"
    return True
