"""Real faults in a real training run of four Gloo ranks: does the diagnosis name them, and how soon?

    python benchmarks/scan_live.py --trials 60 [--record results]        (root; Linux with cgroup v1)

Each rank is a process in a network namespace and control groups of its own, all on this machine, beside a
load that comes and goes. A trial waits for quiet training, makes one fault, and reads the watcher's findings.
The first finding that names a cause decides; the diagnosis never hears of the trial. Nothing is simulated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scan_live_job import LAYOUTS, ROOT, Job, Layout, job, write_data
from scan_live_limits import Limits, limits
from scan_live_network import Hosts, hosts

sys.path.insert(0, str(ROOT))

from mt_megatron.scan.attendant import drill_path  # noqa: E402
from mt_megatron.scan.faults import parse_fault  # noqa: E402
from mt_megatron.scan.run_files import run_files, write_private  # noqa: E402

RANKS = 4
SECONDS, STEPS = 15.0, 10
_QUIET_STEPS, _QUIET_SECONDS = 12, 8.0
_WAIT = 20.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One fault."""

    name: str
    ranks: tuple[int, ...]
    causes: tuple[str, ...]
    """What it may be called."""

    begin: Callable[[], Any]
    """A context manager: the fault is on inside it."""


@dataclass(kw_only=True)
class Trial:
    """What happened."""

    layout: str
    fault: str
    ranks: tuple[int, ...]
    causes: tuple[str, ...]
    step: int
    named_cause: str | None = None
    named_ranks: tuple[int, ...] = ()
    confidence: float = 0.0
    seconds: float | None = None
    steps: int | None = None
    steps_trained: int | None = None
    evidence: str = ""
    right: bool = False
    right_later: bool = False
    alarms_before: int = 0
    """Findings of no fault, since the last one was over."""

    in_time: bool = False


def plan(layout: Layout, running: Job, network: Hosts, groups: Limits, seed: int) -> list[Planned]:
    """Faults of this layout, one of each kind, in random order on random ranks."""
    pick = random.Random(seed)
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
    add("processor quota", (c,), ("host_contention",), lambda: groups.quota(c, 0.12))
    d = rank()
    add("competing load", (d,), ("host_contention",), lambda: groups.competitors(d, 4))
    e = rank()
    add("repeated work", (e,), ("slow_compute",), lambda: _drill(running, f"slow_rank:rank={e},factor=3"))
    if layout.links:
        f = pick.choice(layout.links)
        add("delayed sockets", f, ("slow_link",), lambda: network.delayed(*f, layout.delay))
        g = pick.choice(layout.links)
        add("narrow cable", g, ("slow_link",), lambda: network.narrow(*g, layout.megabits))
    if layout.reads:
        h = pick.choice(layout.reads)
        add("throttled reads", (h,), ("slow_data",), lambda: groups.slow_reads(h, 10))
    if layout.saves:
        i = rank()
        add("throttled writes", (i,), ("slow_checkpoint",), lambda: groups.slow_writes(i, 1_000_000))
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
    """A process that is busy for random stretches, ``share`` of the time."""
    program = (
        "import random, sys, time\n"
        "share = float(sys.argv[1])\n"
        "while True:\n"
        "    busy = random.expovariate(1 / 0.2)\n"
        "    end = time.monotonic() + busy\n"
        "    while time.monotonic() < end: sum(i * i for i in range(10_000))\n"
        "    time.sleep(busy * (1 - share) / share)\n"
    )
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", program, str(share)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def wait_for_quiet(running: Job, least_steps: int, before: set[int]) -> int:
    """Until there were so many steps more and no finding for a while; or a minute has passed. Returns how
    many findings there were that do not concern ranks ``before``, those of the last fault."""
    alarms = 0
    first, began = running.step(), time.monotonic()
    _, offset = running.findings(0)
    heard = began
    while time.monotonic() - began < 60.0:
        running.check()
        found, offset = running.findings(offset)
        if found:
            heard = time.monotonic()
            alarms += sum(not before & set(each["ranks"]) for each in found)
        if running.step() - first >= least_steps and time.monotonic() - heard >= _QUIET_SECONDS:
            break
        time.sleep(0.2)
    return alarms


def trial(layout: Layout, running: Job, fault: Planned) -> Trial:
    """Make the fault and listen."""
    found = Trial(
        layout=layout.name, fault=fault.name, ranks=fault.ranks, causes=fault.causes, step=running.step()
    )
    _, offset = running.findings(0)
    began_unix, began = time.time(), time.monotonic()
    with fault.begin():
        while time.monotonic() - began < _WAIT and not found.right and not found.right_later:
            running.check()
            time.sleep(0.1)
            news, offset = running.findings(offset)
            for finding in news:
                _judge(found, finding, running, began_unix)
    return found


def _judge(found: Trial, finding: dict[str, Any], running: Job, began: float) -> None:
    if finding["cause"] == "unknown" or finding["confidence"] < 0.5:
        return
    if finding["last_step"] < found.step:
        found.alarms_before += 1  # of steps before the fault: wrong, but no name for it
        return
    ranks = tuple(sorted(finding["ranks"]))
    right = finding["cause"] in found.causes and ranks == tuple(sorted(found.ranks))
    if found.named_cause is not None:
        found.right_later = found.right_later or right
        return
    found.named_cause, found.named_ranks = finding["cause"], ranks
    found.confidence = finding["confidence"]
    found.seconds = round(float(finding["time_unix"]) - began, 2)
    found.steps = int(finding["named_at_step"]) - found.step
    found.steps_trained = running.step() - found.step
    found.evidence = "; ".join(finding.get("evidence", ()))[:400]
    found.right = right
    found.in_time = right and found.seconds <= SECONDS and found.steps <= STEPS


def run_layout(layout: Layout, seed: int, scratch: Path, options: argparse.Namespace) -> list[Trial]:
    """One training run and its trials."""
    folder = (options.keep or scratch) / f"{layout.name}-{seed}"
    trials = []
    with (
        hosts(RANKS) as network,
        limits(RANKS, scratch, options.shares) as groups,
        job(layout, folder, scratch / "data", network, groups) as running,
    ):
        _wait_for_first_steps(running)
        groups.release(running.watcher())
        for fault in plan(layout, running, network, groups, seed)[: options.per_run]:
            alarms = wait_for_quiet(running, _QUIET_STEPS, set(trials[-1].ranks) if trials else set())
            if "reads" in fault.name:
                _forget(scratch / "data.bin")
            one = trial(layout, running, fault)
            one.alarms_before += alarms
            trials.append(one)
            late = "later" if one.right_later else "WRONG"
            mark = "right" if one.right else ("not named" if one.named_cause is None else late)
            print(
                f"{time.strftime('%H:%M:%S')} {layout.name} step {one.step}: {one.fault} of {one.ranks}: "
                f"{mark}: {one.named_cause} {one.named_ranks} after {one.seconds} s, {one.steps} steps "
                f"({one.confidence:.2f})",
                flush=True,
            )
    return trials


def _forget(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _wait_for_first_steps(running: Job) -> None:
    deadline = time.monotonic() + 180.0
    while running.step() < 5:
        running.check()
        if time.monotonic() > deadline:
            raise RuntimeError("no five steps within three minutes")
        time.sleep(0.2)


def summary(trials: list[Trial]) -> dict[str, Any]:
    """Shares of all and per fault."""
    by_fault: dict[str, list[Trial]] = defaultdict(list)
    for one in trials:
        by_fault[one.fault].append(one)
    times = sorted(one.seconds for one in trials if one.right and one.seconds is not None)
    return {
        "trials": len(trials),
        "right": sum(one.right for one in trials),
        "right_in_time": sum(one.in_time for one in trials),
        "wrong": sum(one.named_cause is not None and not one.right for one in trials),
        "alarms_without_fault": sum(one.alarms_before for one in trials),
        "unnamed": sum(one.named_cause is None for one in trials),
        "median_seconds": times[len(times) // 2] if times else None,
        "longest_seconds": times[-1] if times else None,
        "by_fault": {
            name: {
                "trials": len(ones),
                "right": sum(one.right for one in ones),
                "right_in_time": sum(one.in_time for one in ones),
                "named": dict(Counter(str(one.named_cause) for one in ones)),
            }
            for name, ones in sorted(by_fault.items())
        },
    }


def main() -> int:
    """Run the trials and print or record what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--per-run", type=int, default=9, help="most faults in one training run (9)")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--load", type=float, default=0.3, help="share of time a background load is on (0.3)")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the training data (512)")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no training run after so long")
    parser.add_argument(
        "--shares", type=int, default=1024, help="of the processors for each rank (1024: as any process)"
    )
    parser.add_argument("--keep", type=Path, help="leave the runs' folders here")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write dated results into this folder")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("namespaces and control groups need root")
    # Told to end, it still ends what it started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    trials: list[Trial] = []
    seed, began = options.first_seed, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="scan_live_") as name, background_load(options.load):
        scratch = Path(name)
        write_data(scratch / "data", options.megabytes)
        while len(trials) < options.trials and time.monotonic() - began < 60 * options.minutes:
            layout = LAYOUTS[options.layouts[(seed - options.first_seed) % len(options.layouts)]]
            try:
                trials += run_layout(layout, seed, scratch, options)
            except RuntimeError as error:
                print(f"{layout.name}: the run itself failed: {error}", file=sys.stderr, flush=True)
            seed += 1
    figures = summary(trials)
    print(json.dumps(figures, indent=1))
    if options.record is not None:
        _record(options.record, figures, trials)
    return 0


def _record(folder: Path, figures: dict[str, Any], trials: list[Trial]) -> None:
    from recording import machine, record, table

    rows = [
        [name, str(one["trials"]), str(one["right"]), str(one["right_in_time"]), str(one["named"])]
        for name, one in figures["by_fault"].items()
    ]
    rows.append(["all", *(str(figures[key]) for key in ("trials", "right", "right_in_time")), ""])
    whole = {"machine": machine(), **figures, "each": [asdict(one) for one in trials]}
    tables = table(["fault", "trials", "right", f"within {STEPS} steps and {SECONDS:g} s", "named"], rows)
    for path in record(folder, "scan-live", "Live faults, real ones, four Gloo ranks", whole, tables):
        print(path)


if __name__ == "__main__":
    sys.exit(main())
