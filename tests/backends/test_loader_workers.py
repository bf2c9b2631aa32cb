"""Loader workers of a user's script: signals of the process group do not end them, their parent does."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch import ROOT, run_command

SCRIPT = """
import json, os, signal, subprocess, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.tensor(index)  # workers hand tensors over through a socket in the temporary folder

class Stuck(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        open(sys.argv[2], "w").close()
        time.sleep(600)

def signalled(method, after):
    # The sender is another process: a worker obeys the SIGTERM of its parent.
    iterator = iter(DataLoader(Numbers(), num_workers=2, multiprocessing_context=method, batch_size=None))
    found = [int(next(iterator)) for _ in range(after)]
    for name in sys.argv[3:]:
        subprocess.run(["kill", "-" + name, *(str(worker.pid) for worker in iterator._workers)], check=True)
    return found + [int(number) for number in iterator]

def ended_by_parent(method):
    iterator = iter(DataLoader(Stuck(), num_workers=1, multiprocessing_context=method, batch_size=None))
    deadline = time.monotonic() + 60
    while not os.path.exists(sys.argv[2]) and time.monotonic() < deadline:
        time.sleep(0.02)
    worker = iterator._workers[0]
    worker.terminate()
    worker.join(30)
    return worker.exitcode

def main():
    method = sys.argv[1]
    found = {"at once": signalled(method, 0), "later": signalled(method, 4)}
    if len(sys.argv) > 3:
        found["blocked"] = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        found["ended by parent"] = ended_by_parent(method)
    print(json.dumps(found), flush=True)
    iterator = iter(DataLoader(Numbers(), num_workers=2, multiprocessing_context=method, batch_size=None))
    next(iterator)
    print(json.dumps([worker.pid for worker in iterator._workers]), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    main()
"""
PATCHED = ("-m", "mt_megatron.cli", "run", "--backend", "cpu", "--")


def environment() -> dict[str, str]:
    found = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MT_MEGATRON_BACKEND"):
        found.pop(name, None)
    return found


def start(folder: Path, *words: str, script: str = SCRIPT) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, *PATCHED, "script.py", *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def line_of(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()[-3000:]
    return json.loads(line)


def end(process: subprocess.Popen[str]) -> None:
    # The group is still there when only workers are left, and they hold the pipes.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait_for_end(workers: list[psutil.Process], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.daily)])
def test_signals_end_no_worker_but_its_parent_does(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("MT_MEGATRON_TEMPORARY_FOLDER", str(temporary))
    process = start(tmp_path, method, str(tmp_path / "stuck"), "TERM", "USR1", "INT")
    try:
        found = line_of(process)
        assert found["at once"] == found["later"] == list(range(32))
        assert found["blocked"] == [], "only the workers keep the signals blocked"
        assert found["ended by parent"] == 0
        workers = [psutil.Process(pid) for pid in line_of(process)]
        assert any(temporary.iterdir())
        process.kill()
        process.wait()
        shutil.rmtree(temporary)  # as a launch does that ends
        wait_for_end(workers, 3.0)
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    finally:
        end(process)


# The trainer is gone before a worker has begun to work.
ORPHANS = """
import os, signal, sys
from torch.utils.data import DataLoader

def main():
    iterator = iter(DataLoader(range(8), num_workers=2, multiprocessing_context=sys.argv[1]))
    print([worker.pid for worker in iterator._workers], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(each, marks=() if each == "fork" else pytest.mark.daily)
        for each in multiprocessing.get_all_start_methods()
    ],
)
def test_workers_of_a_parent_that_died_early_end(tmp_path: Path, method: str) -> None:
    process = start(tmp_path, method, script=ORPHANS)
    try:
        workers = [psutil.Process(pid) for pid in line_of(process) if psutil.pid_exists(pid)]
        process.wait(60)
        wait_for_end(workers)
    finally:
        end(process)


# A fork server hands its blocked signals on to every process that it makes.
OTHERS = """
import multiprocessing, sys, time
from mt_megatron.backends.loader_workers import spawned_are_patched, starting

def main():
    spawned_are_patched()
    context = multiprocessing.get_context(sys.argv[1])
    worker, other = (context.Process(target=time.sleep, args=(600,), daemon=True) for _ in range(2))
    with starting(context):
        worker.start()
    other.start()
    other.terminate()
    other.join(20)
    print(other.exitcode)
    worker.kill()
    other.kill()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_processes_started_after_the_workers_can_be_ended(tmp_path: Path, method: str) -> None:
    (tmp_path / "script.py").write_text(OTHERS)
    ended = subprocess.run(
        [sys.executable, "script.py", method],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout == f"{-signal.SIGTERM}\n", ended.stderr


@pytest.mark.parametrize(("name", "text"), [("TERM", "Terminated"), ("USR1", "User defined signal 1")])
def test_without_the_patch_the_signal_ends_the_worker(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run_command(
        [sys.executable, "script.py", "fork", str(tmp_path / "stuck"), name],
        cwd=tmp_path,
        env=environment(),
        timeout=60,
    )
    assert ended.returncode == 1
    # The reader's look at its workers names no signal; it may come before the handler of SIGCHLD.
    assert "DataLoader worker (pid" in ended.stderr
    assert text in ended.stderr or "exited unexpectedly" in ended.stderr
