"""One context traces a program of one's own, and what fails in it is said and ends no program."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from mt_megatron.errors import ConfigError
from mt_megatron.scan.format.records import KIND
from mt_megatron.scan.format.run_files import read_run, run_files
from mt_megatron.scan.format.segments import read_rank, sessions
from mt_megatron.scan.monitor.watcher_process import Alerting, WatcherProcess
from mt_megatron.scan.record.control import change_control
from mt_megatron.scan.record.levels import Window
from mt_megatron.scan.session import session
from mt_megatron.seams import events
from tests.launch import run_ranks


def steps(count: int, first: int = 1) -> None:
    for iteration in range(first, first + count):
        with events.span("step", iteration=iteration):
            for microbatch in range(2):
                with events.span("forward", microbatch=microbatch, chunk=0):
                    time.sleep(0.0005)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("scan-")]


def test_a_block_is_traced_and_nothing_stays(tmp_path: Path) -> None:
    with session(tmp_path, watch=False) as traced:
        steps(3)
        assert traced.recorder is not None and events.listening()
        assert not traced.wants_measurement and not traced.wants_to_leave
        traced.recorder.note(what="mine", value=3)
    traced.close()
    assert not events.listening() and own_threads() == []
    trace = read_rank(tmp_path / "scan" / "rank-00000")
    assert sorted(set(trace.spans["iteration"].tolist()) - {0}) == [1, 2, 3]
    assert (trace.spans["kind"] == KIND["forward"]).sum() == 6
    assert [note["value"] for note in trace.notes if note.get("what") == "mine"] == [3]
    facts = read_run(run_files(tmp_path))
    assert facts["world_size"] == 1 and facts["ranks"][0]["rank"] == 0 and facts["backend"]


def test_a_rank_s_files_stay_at_their_bound(tmp_path: Path) -> None:
    """10 MB of spans: the oldest files go."""
    with session(tmp_path, watch=False, retain_mib=1):
        for number in range(60_000):
            with events.span("data", iteration=number):
                pass
    (folder,) = (tmp_path / "scan").glob("rank-*")
    assert 2**19 < sum(path.stat().st_size for path in folder.glob("*.scan")) <= 2**20


def test_each_session_is_told_from_the_one_before(tmp_path: Path) -> None:
    for first in (1, 4):
        with session(tmp_path, watch=False):
            steps(2, first)
    folder = tmp_path / "scan" / "rank-00000"
    assert sessions(folder) == [0, 1]
    assert 4 not in read_rank(folder, session=0).spans["iteration"]
    assert 1 not in read_rank(folder).spans["iteration"]


def test_modules_are_recorded_within_windows_of_level_full(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with session(tmp_path, watch=False, window=Window(every=2, steps=1, level="full"), modules=[model]):
        for iteration in (1, 2, 3):
            with events.span("step", iteration=iteration):
                model(torch.ones(1, 2)).sum().backward()
    spans = read_rank(tmp_path / "scan" / "rank-00000").spans
    inside = spans[spans["kind"] == KIND["module"]]["iteration"].tolist()
    assert set(inside) == {1, 3}
    assert "forward" not in vars(model[0])


def test_an_error_in_the_block_ends_the_tracing_and_stays_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), session(tmp_path, watch=False):
        steps(1)
        raise ZeroDivisionError
    assert not events.listening() and own_threads() == []
    assert len(read_rank(tmp_path / "scan" / "rank-00000").spans)


def test_a_folder_that_cannot_be_made_is_said_and_the_block_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "scan").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="mt_megatron"), session(tmp_path) as traced:
        steps(1)
        assert traced.recorder is None and not events.listening() and own_threads() == []
    assert [line for line in caplog.messages if "nothing is traced, training goes on: rank 0" in line]


def test_a_wrong_level_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="expected one of off, base, full, kernel"),
        session(tmp_path, level="deep"),  # type: ignore[arg-type]
    ):
        pass
    assert not (tmp_path / "scan").exists()


def test_places_are_those_of_the_groups_that_exist(tmp_path: Path) -> None:
    found = run_ranks(4, "tests.scan.session_ranks:places", str(tmp_path))
    assert found == [[[0, 0], [0, 1], [1, 0], [1, 1]]] * 4


def test_the_watcher_runs_beside_and_ends_with_the_session(tmp_path: Path) -> None:
    with session(tmp_path, watch=False):
        steps(5)
    lines: list[str] = []
    watcher = WatcherProcess(
        tmp_path / "scan", Alerting(prometheus_port=0), say=lines.append, start_after=0.0
    )
    watcher.start()
    until = time.monotonic() + 60
    while watcher.process is None and time.monotonic() < until:
        time.sleep(0.01)
    assert watcher.process is not None
    stat = Path(f"/proc/{watcher.process.pid}/environ")
    assert b"\0RANK=" not in b"\0" + stat.read_bytes()
    watcher.close()
    assert watcher.process.poll() is not None
    assert own_threads() == []


def test_a_run_that_is_over_soon_starts_no_second_process(tmp_path: Path) -> None:
    with session(tmp_path) as traced:
        steps(1)
        watcher = traced._watcher
    assert watcher is not None and watcher.process is None


def test_a_watcher_that_ends_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watcher = WatcherProcess(tmp_path, Alerting(), start_after=0.0)
    with caplog.at_level(logging.WARNING, logger="mt_megatron"):
        watcher.start()
        until = time.monotonic() + 60
        while watcher.process is None and time.monotonic() < until:
            time.sleep(0.01)
        assert watcher.process is not None
        os.kill(watcher.process.pid, signal.SIGKILL)
        while not caplog.messages and time.monotonic() < until:
            time.sleep(0.05)
        watcher.close()
    assert [line for line in caplog.messages if "ended with code -9; training goes on" in line]


KILLED = """
import sys, time
from pathlib import Path
from mt_megatron.scan.monitor.watcher_process import Alerting, WatcherProcess
watcher = WatcherProcess(Path(sys.argv[1]), Alerting(), start_after=0.0)
watcher.start()
while watcher.process is None:
    time.sleep(0.01)
print(watcher.process.pid, flush=True)
time.sleep(600)
"""


def test_the_watcher_does_not_outlive_a_killed_rank(tmp_path: Path) -> None:
    with session(tmp_path, watch=False):
        steps(1)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "scan")]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert rank.stdout is not None
        watcher = int(rank.stdout.readline())
        assert running(watcher)
        rank.kill()
        rank.wait(timeout=60)
        until = time.monotonic() + 60
        while running(watcher) and time.monotonic() < until:
            time.sleep(0.05)
        assert not running(watcher)
    finally:
        rank.kill()
        rank.communicate()


def running(pid: int) -> bool:
    """Whether there is such a process that has not ended; one that nobody has waited for has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_alerting_becomes_arguments() -> None:
    assert Alerting().arguments() == []
    assert Alerting(prometheus_port=0).arguments() == ["--prometheus-port", "0"]
    open_to_others = Alerting(
        prometheus_port=1, prometheus_address="0.0.0.0", prometheus_hosts=("a.example", "b.example")
    )
    assert open_to_others.arguments()[2:] == [
        "--prometheus-address=0.0.0.0",
        "--prometheus-host=a.example",
        "--prometheus-host=b.example",
    ]


def test_the_webhooks_address_is_in_nobodys_process_list(tmp_path: Path) -> None:
    with session(tmp_path, watch=False):
        steps(1)
    alerting = Alerting(webhook="http://127.0.0.1:1/secret")
    watcher = WatcherProcess(tmp_path / "scan", alerting, say=lambda line: None, start_after=0.0)
    watcher.start()
    until = time.monotonic() + 60
    while watcher.process is None and time.monotonic() < until:
        time.sleep(0.01)
    assert watcher.process is not None
    process = Path(f"/proc/{watcher.process.pid}")
    assert b"secret" in (process / "environ").read_bytes()
    assert b"secret" not in (process / "cmdline").read_bytes()
    watcher.close()


def test_what_an_earlier_session_was_asked_for_is_forgotten(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    with session(tmp_path, watch=False):
        change_control(files, {"level": "full"})
    with session(tmp_path, watch=False):
        assert change_control(files, {"window": False}) == {"window": False}
