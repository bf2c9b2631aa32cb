"""SIGTERM and SIGUSR1 ask a run to save and end; a second SIGTERM ends the process at once."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mt_megatron.training.process_end import end_process

_REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
_END = b"\0"

_installed: list[signal.Signals] = []


def _in_a_fork() -> None:
    """Data loaders fork: their processes are told to end by others, and have their own use of SIGTERM."""
    if _installed:
        signal.set_wakeup_fd(-1)
        for number in _installed:
            signal.signal(number, signal.SIG_DFL)
        _installed.clear()


os.register_at_fork(after_in_child=_in_a_fork)


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that is set when the process is asked to save and end.

    The signals are seen by a thread of their own, because Python runs handlers in the main thread,
    which may wait in a collective for as long as it likes. Outside of the main thread, and for a
    signal that other native code handles, nothing is installed.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    taken = [number for number in _REQUESTS if signal.getsignal(number) is not None]
    before = {number: signal.signal(number, lambda number, frame: event.set()) for number in taken}
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(reading, event), name="signals", daemon=True)
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


def _listen(reading: socket.socket, event: threading.Event) -> None:
    terminations = 0
    while (received := reading.recv(1)) != _END:
        number = received[0]
        if number in _REQUESTS:
            event.set()
        terminations += number == signal.SIGTERM
        if terminations > 1:
            end_process(128 + signal.SIGTERM, f"process {os.getpid()}: ended by a second SIGTERM")
