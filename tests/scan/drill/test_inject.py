"""Faults for drills: how they are asked for, that they are real, and that they are undone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest

from mt_megatron.backends import registry
from mt_megatron.errors import ConfigError, ScanError
from mt_megatron.scan.drill.faults import FORMER_KINDS, KINDS, Fault, faults_from, parse_fault
from mt_megatron.scan.drill.inject import Injector
from mt_megatron.scan.findings.finding import Cause
from mt_megatron.scan.format.permissions import make_private_folder
from mt_megatron.scan.format.recording_end import Ending, may_record, require_recorder
from mt_megatron.scan.format.run_files import RunFiles, run_files, write_run
from mt_megatron.scan.record.recorder import Recorder
from mt_megatron.scan.respond.agent import Attendant, drill_path
from mt_megatron.seams import events
from tests.locks import locked_by_another
from tests.scan.recordings import record

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def injector(tmp_path: Path) -> Iterator[Injector]:
    found = Injector(1, tmp_path, registry.get("cpu"))
    yield found
    found.close()
    assert not events.listening(), "off is off"


def fault(text: str) -> Fault:
    return parse_fault(text)


def spent(name: events.EventName, clock: Callable[[], float], **attrs: Any) -> float:
    began = clock()
    with events.span(name, **attrs):
        _work()
    return clock() - began


def _work() -> None:
    until = time.thread_time() + 0.03
    while time.thread_time() < until:
        pass


def test_every_kind_is_read_back_as_it_was_written() -> None:
    for kind in KINDS:
        who = "ranks=3-5" if kind == "slow_link" else "rank=3"
        one = parse_fault(f"{kind}:{who}")
        assert one.figures == KINDS[kind][1] and parse_fault(one.text()) == one
        assert faults_from(json.loads(json.dumps([one.to_dict()]))) == (one,)
    assert parse_fault("slow_compute:factor=1.25,rank=2-4").ranks == (2, 4)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("slow", "expected one of slow_compute"),
        ("slow_compute", "found no rank"),
        ("slow_compute:rank=x", "expected numbers from 0"),
        ("slow_compute:rank=-1", "expected numbers from 0"),
        ("slow_compute:rank=1,speed=2", "expected NAME=VALUE with one of rank, factor"),
        ("slow_compute:rank=1,factor=nan", "expected a number above 0"),
        ("slow_compute:rank=1,factor=0.5", "expected at least 1"),
        ("slow_compute:rank=8", "expected 0 to 7"),
        ("slow_link:ranks=2", "expected two"),
        ("slow_link:ranks=2-2", "expected two"),
        ("host_pause:rank=1,seconds=5,every=2", "expected more than seconds"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_fault(text, 8)


@pytest.mark.parametrize("records", [[{}], [{"kind": "slow_compute", "ranks": 3, "figures": {}}], [1]])
def test_a_file_of_somebody_elses_is_refused(records: Any) -> None:
    with pytest.raises(ConfigError):
        faults_from(records)


def test_a_slow_rank_really_works_more(injector: Injector) -> None:
    usual = spent("forward", time.thread_time)
    injector.set([fault("slow_compute:rank=1,factor=4")])
    spent("forward", time.thread_time)  # this one is measured
    slow = spent("forward", time.thread_time)
    assert slow > 2.5 * usual, "processor time, which no other process can take"
    assert spent("layer", time.thread_time, number=1) < 2 * usual, "once per pass, not in its parts too"
    injector.close()
    assert spent("forward", time.thread_time) < 2 * usual


def test_time_in_collectives_is_no_work_to_be_repeated(injector: Injector) -> None:
    injector.set([fault("slow_compute:rank=1,factor=2")])
    for _ in range(2):
        before = time.thread_time()
        with events.span("forward"), events.span("collective", op="all_reduce", group="tp", ranks=(0, 1)):
            _work()
        used = time.thread_time() - before
    assert used < 0.045, "0.03 s of it in the collective, and nothing of that again"


def test_other_ranks_faults_are_not_this_ones(injector: Injector) -> None:
    injector.set([fault("slow_compute:rank=0,factor=4"), fault("slow_link:ranks=2-3")])
    assert injector.faults == () and not events.listening()


def test_a_slow_link_holds_up_what_goes_over_it_and_nothing_else(injector: Injector) -> None:
    injector.set([fault("slow_link:ranks=1-2,latency_ms=200")])

    def held_up(name: events.EventName, **attrs: Any) -> bool:
        before = time.process_time(), time.perf_counter()
        with events.span(name, **attrs):
            pass
        return time.perf_counter() - before[1] >= 0.2

    assert held_up("p2p", transfers=(("send", 2, 0, 8), ("recv", 0, 0, 8)), ranks=(0, 1, 2))
    assert not held_up("p2p", transfers=(("send", 0, 1, 8),), ranks=(0, 1, 2))
    assert held_up("collective", op="all_reduce", ranks=(1, 2))
    assert not held_up("collective", op="all_reduce", ranks=(0, 1, 2, 3))


def test_a_slow_disk_really_writes(injector: Injector, tmp_path: Path) -> None:
    injector.set([fault("slow_data:rank=1,ms=150")])
    writes = psutil.Process().io_counters().write_count
    began = time.perf_counter()
    with events.span("data"):
        pass
    assert time.perf_counter() - began >= 0.15
    assert psutil.Process().io_counters().write_count > writes
    assert list(tmp_path.iterdir()) == []


def test_a_pause_really_stops_the_process_and_lets_it_go_on(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from mt_megatron.scan.drill.faults import parse_fault\n"
        "from mt_megatron.scan.drill.inject import Injector\n"
        "injector = Injector(1, Path(sys.argv[1]), None)\n"
        "injector.set([parse_fault('host_pause:rank=1,seconds=0.7,every=1')])\n"
        "longest, before, end = 0.0, time.monotonic(), time.monotonic() + 1.5\n"
        "while time.monotonic() < end:\n"
        "    time.sleep(0.005)\n"
        "    now = time.monotonic()\n"
        "    longest, before = max(longest, now - before), now\n"
        "injector.close()\n"
        "print(longest)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 0.65


def test_busy_neighbours_end_with_the_drill(injector: Injector) -> None:
    before = set(psutil.Process().children())
    injector.set([fault("host_contention:rank=1,processes=2")])
    children = set(psutil.Process().children()) - before
    assert len(children) == 2
    injector.close()
    assert not any(child.is_running() for child in children)


def test_what_fails_in_a_drill_ends_the_drill_alone(
    injector: Injector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mt_megatron.scan.drill.inject.write_for", lambda *given: 1 / 0)
    injector.set([fault("slow_data:rank=1,ms=100")])
    for _ in range(3):
        with events.span("data"):
            pass
    assert sum("drill" in record.getMessage() for record in caplog.records) == 1


def recording(files: RunFiles, rank: int) -> Ending:
    """What says that a rank records."""
    make_private_folder(files.rank_folder(rank))
    return Ending(files.rank_folder(rank), 0)


def test_the_command_asks_a_running_rank_and_takes_it_back(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    write_run(files, {"world_size": 2})
    ending = recording(files, 1)
    attendant = Attendant(
        files,
        rank=1,
        hosts={0: "a", 1: "a"},
        backend=registry.get("cpu"),
        progress=time.monotonic,
        note=lambda note: None,
    )
    attendant.start()
    listened: list[bool] = []
    stop = threading.Event()
    looking = threading.Thread(
        target=lambda: [listened.append(events.listening()) for _ in iter(lambda: stop.wait(0.02), True)]
    )
    looking.start()
    try:
        done = inject(tmp_path, "slow_compute:rank=1", "--seconds", "2")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[:1] == ["rank 1: slow_compute:rank=1,factor=1.5"]
        assert not drill_path(files).exists()
        deadline = time.monotonic() + 20
        while events.listening():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        stop.set()
        looking.join()
        attendant.close()
        ending.close()
    assert any(listened), "it was on"


KILLED = """
import os, signal, sys
from mt_megatron.scan.record.recorder import Recorder
Recorder(sys.argv[1], rank=0).start()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", "closed", "made elsewhere"])
def test_a_run_that_is_over_is_asked_for_nothing(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from mt_megatron.cli.main import main

    files = run_files(tmp_path)
    write_run(files, {"world_size": 2})
    if how == "killed":
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment).returncode == -9
    elif how == "closed":
        record(tmp_path, lambda recorder: None)
    before = {path: path.stat().st_mtime_ns for path in files.root.rglob("*")}
    began = time.monotonic()
    assert main(["scan", "inject", str(tmp_path), "slow_compute:rank=1"]) == 1
    assert main(["scan", "confirm", str(tmp_path), "--ranks", "1"]) == 1
    assert time.monotonic() - began < 5
    assert capsys.readouterr().err.count(f"no rank records to {files.root}") == 2
    assert {path: path.stat().st_mtime_ns for path in files.root.rglob("*")} == before
    assert main(["scan", "level", str(tmp_path), "full"]) == 0
    assert "no rank records there" in capsys.readouterr().out


def test_a_run_that_goes_on_may_be_asked(tmp_path: Path) -> None:
    """A child of the rank that lives on does not make it one that records."""
    from mt_megatron.cli.main import main

    files = run_files(tmp_path)
    recorder = Recorder(tmp_path, rank=0)
    recorder.start()
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        require_recorder(files)
        assert may_record(files.rank_folder(0)) and not may_record(files.rank_folder(1))
        recorder.close()
        with pytest.raises(ScanError, match="no rank records to"):
            require_recorder(files)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    write_run(files, {"world_size": 2})
    assert main(["scan", "inject", str(tmp_path), "slow_compute:rank=2"]) == 2, "there is no such rank"
    assert main(["scan", "inject", str(tmp_path / "none"), "slow_compute:rank=1"]) != 0


def inject(run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mt_megatron.cli", "scan", "inject", str(run), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_of_two_drills_at_once_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between the look at the other's file and the own one, and until that is removed."""
    from mt_megatron.cli.main import main

    files = run_files(tmp_path)
    write_run(files, {"world_size": 2})
    with locked_by_another(files.root / ".inject.json.lock"), contextlib.closing(recording(files, 1)):
        assert main(["scan", "inject", str(tmp_path), "slow_compute:rank=1", "--seconds", "1"]) == 2
    assert "another drill is on" in capsys.readouterr().err and not drill_path(files).exists()


def test_faults_have_the_names_of_their_causes_and_former_ones_are_read() -> None:
    from tools.scan_simulator.faults import _OPTIONS
    from tools.scan_simulator.faults import parse_fault as simulated

    assert set(KINDS) - {"jitter"} <= set(get_args(Cause)) & set(_OPTIONS)
    assert set(FORMER_KINDS.values()) <= set(KINDS)
    for former, kind in FORMER_KINDS.items():
        assert parse_fault(f"{former}:rank=1") == parse_fault(f"{kind}:rank=1")
        assert simulated(f"{former}:rank=1") == simulated(f"{kind}:rank=1")
    shared = "slow_link:ranks=1-2,latency_ms=7"
    assert parse_fault("slow_link:ranks=1-2,ms=7") == parse_fault(shared)
    simulated(shared)
