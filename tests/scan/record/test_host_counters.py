"""Host facts: what Linux tells is read right, what it does not tell is left out."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.backends.telemetry.readings import Reading
from mt_megatron.scan.format.records import KIND
from mt_megatron.scan.format.segments import read_rank
from mt_megatron.scan.record.host_counters import (
    GC_SPAN_NS,
    CgroupThrottling,
    GcPauses,
    HostFacts,
    RunQueue,
    StealTime,
    counters_of,
)
from mt_megatron.scan.record.recorder import Recorder
from tests.launch import ROOT
from tests.scan.recordings import counters, record, step


def test_a_trace_holds_the_hosts_facts(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        step(1)
        time.sleep(0.5)

    found = counters(record(tmp_path, act))
    for name in ("process_cpu_ns", "minor_faults", "voluntary_switches", "gc_pause_ns"):
        values = found[name]
        assert len(values) >= 2 and values == sorted(values), name
    assert found["process_cpu_ns"][0] > 0
    assert min(found["beat_delay_ns"]) >= 0


def schedstat(folder: Path, task: int, ran: int, waited: int) -> None:
    (folder / str(task)).mkdir(parents=True, exist_ok=True)
    with open(folder / str(task) / "schedstat", "w") as file:
        file.write(f"{ran} {waited} 1\n")


def test_waiting_for_a_processor_adds_up_over_the_busiest_threads(tmp_path: Path) -> None:
    for task in range(20):
        schedstat(tmp_path, task, ran=task, waited=1000)
    queue = RunQueue(str(tmp_path))
    assert queue.wait_ns() == 0
    schedstat(tmp_path, 19, ran=100, waited=1500)
    schedstat(tmp_path, 0, ran=0, waited=9000)  # Idle: not followed.
    assert queue.wait_ns() == 500
    # The idle one becomes the busiest; what it waited before it was followed does not count.
    schedstat(tmp_path, 0, ran=10_000, waited=9000)
    queue._choose_at = 0.0
    assert queue.wait_ns() == 500
    schedstat(tmp_path, 0, ran=11_000, waited=9100)
    schedstat(tmp_path, 19, ran=101, waited=1501)
    assert queue.wait_ns() == 601
    queue.close()


def test_a_thread_that_ends_takes_nothing_away(tmp_path: Path) -> None:
    schedstat(tmp_path, 1, ran=5, waited=10)
    queue = RunQueue(str(tmp_path))
    queue.wait_ns()
    schedstat(tmp_path, 1, ran=5, waited=30)
    assert queue.wait_ns() == 20
    (tmp_path / "1" / "schedstat").write_text("")  # What the kernel answers for a thread that is gone.
    assert queue.wait_ns() == 20
    assert queue.wait_ns() == 20


@pytest.mark.skipif(not RunQueue().known, reason="this kernel has no schedstat")
def test_the_real_run_queue_grows_with_competition() -> None:
    code = (
        "import os, threading, time\n"
        "from mt_megatron.scan.record.host_counters import RunQueue\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "queue = RunQueue()\n"
        "before = queue.wait_ns()\n"
        "child = os.fork()\n"
        "end = time.monotonic() + (0.6 if child else 0.7)\n"
        "while time.monotonic() < end:\n    pass\n"
        "if not child:\n    os._exit(0)\n"
        "print(queue.wait_ns() - before)\n"
        "os.waitpid(child, 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=_environment()
    )
    assert int(done.stdout) > 100e6, done.stderr


def test_throttling_of_both_kinds_of_control_groups(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("5:memory:/elsewhere\n1:cpu,cpuacct:/job\n0::/\n")
    assert CgroupThrottling(root, own).throttled_ns() is None
    group = root / "cpu,cpuacct" / "job"
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text("nr_periods 3\nnr_throttled 1\nthrottled_time 700\n")
    throttling = CgroupThrottling(root, own, ask_seconds=0.0)
    assert throttling.throttled_ns() == 0
    (group / "cpu.stat").write_text("nr_periods 9\nnr_throttled 4\nthrottled_time 1000\n")
    assert throttling.throttled_ns() == 300
    # Moved to a group of version 2: what that one went through before does not count.
    own.write_text("0::/user/job\n")
    group = root / "user" / "job"
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text("usage_usec 1\nthrottled_usec 50\n")
    assert throttling.throttled_ns() == 300
    (group / "cpu.stat").write_text("usage_usec 1\nthrottled_usec 52\n")
    assert throttling.throttled_ns() == 2300
    (group / "cpu.stat").write_text("usage_usec 1\n")
    assert throttling.throttled_ns() is None


def test_stolen_time_is_a_share(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 800 0 0 0 0 0 0\n")
    steal = StealTime(stat)
    assert steal.fraction() is None
    stat.write_text("cpu  150 0 100 825 0 0 0 25 0 0\n")
    assert steal.fraction() == 0.25
    assert steal.fraction() is None, "no time has passed"
    stat.write_text("cpu  1 2\n")
    assert steal.fraction() is None
    assert StealTime(tmp_path / "none").fraction() is None


def test_collections_are_counted_and_long_ones_are_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = GcPauses()
    pauses.start()
    gc.collect(0)
    pauses.close()
    assert pauses.total_ns > 0
    counted = pauses.total_ns
    gc.collect(0)
    assert pauses.total_ns == counted, "it hears no longer"
    pauses.take()
    clock = iter([10, 10 + GC_SPAN_NS - 1, 20, 20 + GC_SPAN_NS])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    for phase in ("start", "stop", "start", "stop"):
        pauses._hear(phase, {})
    assert [span[:3] for span in pauses.take()] == [("gc", 20, 20 + GC_SPAN_NS)]
    assert pauses.take() == []
    assert pauses.total_ns == counted + 2 * GC_SPAN_NS - 1


@pytest.mark.parametrize(
    ("ran", "waited", "late", "found"),
    [
        (0, 0, 300_000_000, "stopped"),
        (0, 0, 10_000_000, None),
        (290_000_000, 0, 300_000_000, None),
        (0, 200_000_000, 300_000_000, None),
    ],
    ids=["stood still", "hardly late", "another thread held the interpreter", "waited for a processor"],
)
def test_standing_still_is_told_from_being_busy(
    ran: int, waited: int, late: int, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = HostFacts(lambda name, value: None)
    facts._run_queue.known = True
    now = {"ran": 1_000, "waited": 2_000}
    monkeypatch.setattr(time, "process_time_ns", lambda: now["ran"])
    monkeypatch.setattr(facts._run_queue, "own_wait_ns", lambda: now["waited"])
    facts.pause(0, 0)
    facts.sample()
    now = {"ran": 1_000 + ran, "waited": 2_000 + waited}
    assert facts.pause(5, 5 + late) == found


@pytest.mark.skipif(not RunQueue().known, reason="this kernel has no schedstat")
def test_each_thread_learns_what_it_waited_itself() -> None:
    queue, found = RunQueue(), []
    queue.own_wait_ns()
    with open("/proc/thread-self/schedstat") as file:
        mine = int(file.read().split()[1])

    def ask() -> None:
        with open("/proc/thread-self/schedstat") as file:
            before = int(file.read().split()[1])
        asked = queue.own_wait_ns()
        with open("/proc/thread-self/schedstat") as file:
            found.append((before, asked, int(file.read().split()[1])))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    ((before, asked, after),) = found
    assert before <= asked <= after
    again = queue.own_wait_ns()
    assert again is not None and again >= mine
    queue.close()


@pytest.mark.skipif(not RunQueue().known, reason="this kernel has no schedstat")
def test_a_process_that_was_stopped_says_so(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from mt_megatron.scan.record.recorder import Recorder\n"
        "from tests.scan.recordings import step\n"
        "recorder = Recorder(sys.argv[1], rank=0)\n"
        "recorder.start()\n"
        "print('ready', flush=True)\n"
        "for iteration in range(1, 200):\n"
        "    step(iteration)\n"
        "    time.sleep(0.01)\n"
        "    if sys.stdin in __import__('select').select([sys.stdin], [], [], 0)[0]:\n"
        "        break\n"
        "recorder.close()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
        cwd=ROOT,
    )
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    # Between two beats and away from a flush, which come at multiples of 0.3 and 0.6 s of the clock.
    time.sleep(0.6 - time.time() % 0.6 + 0.15)
    stopped = time.perf_counter_ns()
    child.send_signal(signal.SIGSTOP)
    time.sleep(0.8)
    continued = time.perf_counter_ns()
    child.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    child.communicate(b"\n", timeout=60)
    assert child.returncode == 0
    trace = read_rank(tmp_path / "scan" / "rank-00000")
    pauses = trace.spans[(trace.spans["kind"] == KIND["pause"])]
    pauses = pauses[[trace.strings[name] == "stopped" for name in pauses["name"]]]
    longest = pauses[np_argmax(pauses)]
    assert stopped - 200e6 < longest["begin"] < stopped + 300e6
    assert longest["end"] >= continued - 50e6
    assert max(counters(trace)["beat_delay_ns"]) > 500e6


def np_argmax(pauses: Any) -> int:
    lengths = (pauses["end"] - pauses["begin"]).tolist()
    assert lengths, "no pause was seen"
    return lengths.index(max(lengths))


def test_telemetry_leaves_out_what_is_unsupported() -> None:
    nothing = Reading.nothing("nvml", "no driver")
    assert counters_of(nothing) == []
    some = replace(nothing, power=float("nan"), temperature=61.0, clock=0, throttle_reasons=())
    assert counters_of(some) == [("temperature_c", 61.0), ("clock_mhz", 0.0), ("throttled", 0.0)]
    assert counters_of(replace(nothing, throttle_reasons=("power",))) == [("throttled", 1.0)]


def test_telemetry_that_fails_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Reading:
        raise OSError("the driver has gone")

    def act(recorder: Recorder) -> None:
        step(1)
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.02)

    with caplog.at_level(logging.WARNING):
        record(tmp_path, act, telemetry=broken)
    assert [each.getMessage() for each in caplog.records] == [
        "tracing goes on without telemetry: OSError: the driver has gone"
    ]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
