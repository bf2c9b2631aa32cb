"""Signals ask for an end, whatever the main thread is in; a second SIGTERM or Ctrl-C is the end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mt_megatron.training import signals
from mt_megatron.training.signals import stop_requests
from tests.launch import ROOT, run_ranks

# A mutex that is locked twice: the main thread is in native code and no signal gets it out.
STUCK = """
import ctypes, threading
from mt_megatron.training import signals
from mt_megatron.training.signals import stop_requests
signals._ONE_REQUEST_SECONDS = dict.fromkeys(signals._ONE_REQUEST_SECONDS, {one_request})
with stop_requests() as requested:
    threading.Thread(target=lambda: (requested.wait(), print("asked", flush=True)), daemon=True).start()
    print("ready", flush=True)
    mutex, lock = ctypes.create_string_buffer(256), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)
"""


def stuck(one_request: float) -> subprocess.Popen[str]:
    """A stuck process that takes equal signals within ``one_request`` seconds as one request."""
    code = STUCK.format(one_request=one_request)
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and so does everything below it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stuck_process_hears_the_request_and_ends_at_the_second(first: signal.Signals) -> None:
    second = signal.SIGTERM if first is signal.SIGUSR1 else first
    process = stuck(0.0)
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(first)
        assert process.stdout.readline() == "asked\n"
        assert process.poll() is None
        if first is signal.SIGINT:  # a thread of its own says so, which the second signal may forestall
            assert "Ctrl-C again ends" in process.stderr.readline() + process.stderr.readline()
        if first is signal.SIGUSR1:
            process.send_signal(second)
            # Only the first SIGTERM so far.
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=1)
        process.send_signal(second)
        assert process.wait(timeout=60) == 128 + second
        said = process.stderr.read()
        assert f"ended by a second {second.name}" in said
        assert "Ctrl-C again ends" not in said
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_same_signal_from_several_senders_is_one_request(number: signal.Signals) -> None:
    process = stuck(60.0)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "asked\n"
        for _ in range(3):
            process.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.2)
    finally:
        process.kill()
        process.communicate()


def test_what_torchrun_hands_on_is_no_second_request() -> None:
    assert signals._ONE_REQUEST_SECONDS == {signal.SIGTERM: 5.0, signal.SIGINT: 0.5}


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_requests() as requested:
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
            assert not requested.is_set()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# A fork of the run's process is no run: SIGTERM is the end of it (loader workers shield themselves).
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
    every = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in every]
    with stop_requests() as requested:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        signal.raise_signal(signal.SIGTERM)
        assert requested.wait(30)
    assert [signal.getsignal(number) for number in every] == before
    with stop_requests() as requested:
        assert not requested.is_set()


def test_a_signal_within_a_handler_waits_for_no_lock() -> None:
    """A handler may be interrupted by the next signal's anywhere, also where it holds the event's lock."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        with stop_requests() as requested:
            with requested._cond:
                signal.setitimer(signal.ITIMER_REAL, 10)
                signal.raise_signal(signal.SIGTERM)
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert requested.wait(30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
