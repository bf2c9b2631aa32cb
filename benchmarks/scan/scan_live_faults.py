"""Faults that are made in a live run of four ranks, and the load beside it: real while the block lasts."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
from scan_live_job import ROOT, Job, Layout
from scan_live_limits import Limits
from scan_live_network import Hosts

sys.path.insert(0, str(ROOT))

from mt_megatron.scan.drill.faults import parse_fault  # noqa: E402
from mt_megatron.scan.format.run_files import run_files, write_private  # noqa: E402
from mt_megatron.scan.respond.agent import drill_path  # noqa: E402

RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One fault."""

    name: str
    ranks: tuple[int, ...]
    causes: tuple[str, ...]
    """What it may be called."""

    begin: Callable[[], Any]
    """A context manager: the fault is on inside it."""


def plan(
    layout: Layout, running: Job, network: Hosts, groups: Limits, seed: int, step_seconds: float
) -> list[Planned]:
    """Faults of this layout, one of each kind, in random order on random ranks. ``step_seconds`` without a
    fault: a cable is narrow for what a step sends in that time."""
    pick = random.Random(seed)
    slower = max(1.0, step_seconds)
    rank = lambda: pick.randrange(RANKS)  # noqa: E731
    pids = running.pids()
    planned = []

    def add(name: str, ranks: tuple[int, ...], causes: tuple[str, ...], begin: Callable[[], Any]) -> None:
        planned.append(Planned(name=name, ranks=ranks, causes=causes, begin=begin))

    a = rank()
    add("stopped again and again", (a,), ("host_pause",), lambda: _stops(pids[a], 0.6, 1.5))
    b = rank()
    add("stopped", (b,), ("hang", "host_pause"), lambda: _stopped(pids[b]))
    c = rank()
    add("processor quota", (c,), ("host_contention",), lambda: _quota(groups, c, pids[c]))
    d = rank()
    add("competing load", (d,), ("host_contention",), lambda: groups.competitors(d, *layout.competitors))
    e = rank()
    add("repeated work", (e,), ("slow_compute",), lambda: _drill(running, f"slow_compute:rank={e},factor=3"))
    if layout.links:
        f = pick.choice(layout.links)
        add("delayed sockets", f.ranks, ("slow_link",), lambda: network.delayed(*f.ranks, f.delay))
        g = pick.choice(layout.links)
        add("narrow cable", g.ranks, ("slow_link",), lambda: network.narrow(*g.ranks, g.megabits / slower))
    if layout.reads:
        h = pick.choice(layout.reads)
        add("throttled reads", (h,), ("slow_data",), lambda: groups.slow_reads(h, 10))
    if layout.saves:
        i = rank()
        add("throttled writes", (i,), ("slow_checkpoint",), lambda: groups.slow_writes(i, 400_000))
    pick.shuffle(planned)
    return planned


@contextlib.contextmanager
def _stops(pid: int, seconds: float, every: float) -> Iterator[None]:
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
            ended.wait(every - seconds)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _quota(groups: Limits, rank: int, pid: int) -> contextlib.AbstractContextManager[None]:
    """Two fifths of the processor time that the rank used in the last second."""
    process = psutil.Process(pid)
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(1.0)
    used = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
    return groups.quota(rank, max(0.4 * used, 0.03))


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _drill(running: Job, fault: str) -> Iterator[None]:
    # What ``mt-megatron scan inject`` writes, without its start-up time in the trial.
    path = drill_path(run_files(running.folder))
    wanted = {"until_unix": time.time() + 60, "faults": [parse_fault(fault).to_dict()]}
    write_private(path, json.dumps(wanted))
    try:
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def background_load(share: float) -> Iterator[None]:
    """A process of lower priority (nice 5) that wants a processor for random stretches, ``share`` of the
    time; 0: none."""
    if not share:
        yield
        return
    program = (
        "import random, sys, time\n"
        "share = float(sys.argv[1])\n"
        "while True:\n"
        "    busy = random.expovariate(1 / 0.2)\n"
        "    end = time.monotonic() + busy\n"
        "    while time.monotonic() < end: sum(i * i for i in range(10_000))\n"
        "    time.sleep(busy * (1 - share) / share)\n"
    )
    process = subprocess.Popen(["nice", "-n", "5", sys.executable, "-S", "-E", "-c", program, str(share)])
    try:
        yield
    finally:
        process.kill()
        process.wait()
