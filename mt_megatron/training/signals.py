"""SIGTERM, SIGUSR1 and Ctrl-C ask a run to save and end; a second one ends the process at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from mt_megatron.backends.threads import RankThread


def end_process(code: int, message: str) -> NoReturn:
    """Write ``message`` to stderr, kill child processes, and leave with ``code``.

    Callable from any thread. Nothing is cleaned up: a thread that waits in a collective would wait on.
    """
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"{message}\n".encode(errors="replace"))
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, ValueError):
            child.kill()
    os._exit(code)


_REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_ONE_REQUEST_SECONDS = {signal.SIGTERM: 5.0, signal.SIGINT: 0.5}
"""Where the whole process group gets a signal, torchrun and ``launch`` do too, and hand it on: it arrives
several times. Within this time of the first it is one request; later it is the demand to end at once."""
_END = b"\0"

_installed: list[signal.Signals] = []


def _in_a_fork() -> None:
    """A forked process takes no requests. Data loader workers are shielded by ``backends.loader_workers``."""
    if _installed:
        signal.set_wakeup_fd(-1)
        for number in _installed:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
        _installed.clear()


os.register_at_fork(after_in_child=_in_a_fork)


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that is set when the process is asked to save and end.

    The signals are seen by a thread of their own, because Python runs handlers in the main thread,
    which may wait in a collective for as long as it likes. Outside of the main thread, for a signal
    that other native code handles, and for a SIGINT that the shell had ignored (a job in the
    background), nothing is installed.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    taken = [number for number in _REQUESTS if _is_free(number)]
    # Nothing is done in the handler: an event has a lock, and a second signal that comes while the first
    # one's handler has it would wait for it for ever, in the same thread.
    before = {number: signal.signal(number, lambda number, frame: None) for number in taken}
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread = RankThread(target=_listen, args=(reading, event), name="signals", daemon=True)
    thread.start()
    _installed[:] = taken
    try:
        yield event
    finally:
        _installed.clear()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        # Closing would not do: a forked process may hold the other end as well.
        writing.send(_END)
        thread.join()
        writing.close()
        reading.close()


def _is_free(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    return handler is not None and not (number == signal.SIGINT and handler == signal.SIG_IGN)


def _listen(reading: socket.socket, event: threading.Event) -> None:
    first: dict[signal.Signals, float] = {}
    while (received := reading.recv(1)) != _END:
        if received[0] not in _REQUESTS:
            continue
        number = signal.Signals(received[0])
        event.set()
        now = time.monotonic()
        if number not in first:
            first[number] = now
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                _say("Ctrl-C: saving after this step, then ending; Ctrl-C again ends without a checkpoint")
        elif number in _ONE_REQUEST_SECONDS and now - first[number] >= _ONE_REQUEST_SECONDS[number]:
            end_process(128 + number, f"process {os.getpid()}: ended by a second {number.name}")


def _say(text: str) -> None:
    """Write ``text`` to ``sys.stderr``, which a panel puts above itself. In a thread of its own: a terminal
    that takes nothing may keep it, and the next signal is to be heard."""

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"\n{text}", file=sys.stderr, flush=True)

    RankThread(target=write, name="signals-say", daemon=True).start()
