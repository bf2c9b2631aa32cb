"""SIGTERM and SIGUSR1 ask for an end, whatever the main thread is in; a second SIGTERM is the end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mt_megatron.training.signals import stop_requests
from tests.launch import ROOT, run_ranks

# A mutex that is locked twice: the main thread is in native code and no signal gets it out.
STUCK = """
import ctypes, threading
from mt_megatron.training.signals import stop_requests
with stop_requests() as requested:
    threading.Thread(target=lambda: (requested.wait(), print("asked", flush=True)), daemon=True).start()
    print("ready", flush=True)
    mutex, lock = ctypes.create_string_buffer(256), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)
"""


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stuck_process_hears_the_request_and_ends_at_the_second(first: signal.Signals) -> None:
    command = [sys.executable, "-W", "ignore", "-c", STUCK]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(first)
        assert process.stdout.readline() == "asked\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        if first is signal.SIGUSR1:
            # Only the first SIGTERM so far.
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        assert "ended by a second SIGTERM" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


# A data loader's process is a fork that outlives the run and is ended by SIGTERM.
FORKED = """
import os, signal, time
from mt_megatron.training.signals import stop_requests
ready, say = os.pipe()
with stop_requests() as requested:
    children = [os.fork(), 0]
    if children[0] == 0:
        os.write(say, b"x")
        time.sleep(600)
    os.read(ready, 1)
    os.kill(children[0], signal.SIGTERM)
    status = os.waitpid(children[0], 0)[1]
    children[1] = os.fork()
    if children[1] == 0:
        os.write(say, b"x")
        time.sleep(600)
    os.read(ready, 1)
print(os.waitstatus_to_exitcode(status), requested.is_set(), flush=True)
os.kill(children[1], signal.SIGKILL)
"""


def test_a_forked_process_ends_by_itself_and_holds_nobody_up() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout == f"{-signal.SIGTERM} False\n", ended.stderr


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with stop_requests() as requested:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        signal.raise_signal(signal.SIGTERM)
        assert requested.wait(30)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    with stop_requests() as requested:
        assert not requested.is_set()


def test_a_thread_installs_nothing() -> None:
    found = []

    def elsewhere() -> None:
        with stop_requests() as requested:
            found.append((requested.is_set(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [(False, signal.getsignal(signal.SIGTERM))]


def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.training.signal_cases:asked_on_one_rank", str(tmp_path), timeout=200)
    for rank in found:
        assert not rank["finished"] and rank["iteration"] == rank["asked_in"]
        assert rank["checkpoint"] == f"iter_{rank['iteration']:07d}"
