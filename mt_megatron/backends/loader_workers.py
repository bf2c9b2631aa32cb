"""Data loader workers outlive the signals that ask a run to save and end.

Such a signal often reaches the whole process group: torchrun and Slurm send it so, and a terminal its
Ctrl-C. The trainer then finishes its step, for which it needs the workers. They end when the trainer
closes its loader, or, as torch provides, within seconds of its death.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, util
from typing import Any

SHIELDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that end no worker."""

TEMPORARY_FOLDER = "MT_MEGATRON_TEMPORARY_FOLDER"
"""A launch's folder for its processes' temporary files; the launch removes it when they have ended."""

_LOOK_SECONDS = 0.25
"""From one look at the parent to the next. torch looks every 5 s; its worker then ends in the regular way and
would print a traceback for a socket whose folder the launch has removed meanwhile."""

_FIRST_OF_ALL = 1000
"""Priority among what runs as a process ends; those of torch and multiprocessing are 10 at most."""

_spawned_are_patched = False


def spawned_are_patched() -> None:
    """Every interpreter that this process starts is patched as well, so a spawned worker calls ``shield``."""
    global _spawned_are_patched
    _spawned_are_patched = True


@contextmanager
def starting(context: Any) -> Iterator[None]:
    """Processes that this thread starts meanwhile begin with the signals blocked.

    Without it, a signal between the start of a worker and its ``shield`` would end the worker.
    ``context`` is multiprocessing's, or None for the default one. Where workers do not call ``shield``
    nothing is blocked, because no thread would take the signals there.
    """
    _share_temporary_folder()
    method = (context or multiprocessing).get_start_method()
    # Processes of a fork server begin as the server did, and so would all that it makes later.
    if method == "forkserver" or (method != "fork" and not _spawned_are_patched):
        yield
        return
    if method != "fork":
        # Its start unblocks SIGTERM and SIGINT in this thread.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _share_temporary_folder() -> None:
    """Have workers put their sockets in this process's folder, or in its launch's where there is one.

    A worker that a signal ends leaves a folder of its own behind; this process removes its folder at exit,
    the launch also after a SIGKILL.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if TEMPORARY_FOLDER in os.environ and os.path.isdir(os.environ[TEMPORARY_FOLDER]):
        config.setdefault("tempdir", os.environ[TEMPORARY_FOLDER])
    util.get_temp_dir()


def shield() -> None:
    """In a worker: from now on only its parent can end it by SIGTERM; SIGUSR1 and SIGINT do nothing.

    Programs that the worker starts have these signals blocked, unless they unblock them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    util.Finalize(None, _end_without_parent, exitpriority=_FIRST_OF_ALL)
    threading.Thread(target=_take_signals, name="signals", daemon=True).start()


def _end_without_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and _has_ended(parent):
        os._exit(1)


def _take_signals() -> None:
    parent = multiprocessing.parent_process()
    parents = {os.getppid(), None if parent is None else parent.pid}
    while parent is None or not _has_ended(parent):
        found = signal.sigtimedwait(SHIELDED, _LOOK_SECONDS)
        if found is not None and found.si_signo == signal.SIGTERM and found.si_pid in parents:
            # The loader ends a worker so when it does not answer; torch's own handler uses this code too.
            os._exit(0)
    os._exit(1)


def _has_ended(parent: Any) -> bool:
    """True once the trainer has ended.

    torch's own check compares with the parent at its first call, so it misses a trainer that died before;
    a shielded worker would then never end.
    """
    if os.getppid() == parent.pid:
        return False
    try:
        os.kill(parent.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    # With a fork server the trainer is no parent. Elsewhere its number may be another's by now.
    return not parent.is_alive()
