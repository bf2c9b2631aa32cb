"""Real faults in a real training run of four Gloo ranks: does the diagnosis name them, and how soon?

    python benchmarks/scan/scan_live.py --trials 60 [--record results]        (root; Linux with cgroup v1)

Each rank is a process in a network namespace and control groups of its own, all on this machine, beside a
load that comes and goes. A trial waits for quiet training, makes one fault, and reads the watcher's findings.
The first finding that names a cause decides; the diagnosis never hears of the trial. Nothing is simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scan_live_faults import RANKS, Planned, background_load, plan
from scan_live_job import LAYOUTS, Job, Layout, job, write_data
from scan_live_limits import limits
from scan_live_network import hosts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # For the modules that all benchmarks share.

from recording import machine, record, table  # noqa: E402

SECONDS, STEPS = 15.0, 10
_QUIET_STEPS, _QUIET_SECONDS = 12, 8.0
_WAIT, _WAIT_STEPS, _LONGEST_WAIT = 20.0, 12, 90.0
"""Time for a fault to be named: so many seconds and so many steps, which take longer on slow machines."""


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

    began_unix: float = 0.0
    ended_unix: float = 0.0
    last_step: int = 0
    """The last step reported when the fault was over."""

    quiet_seconds: float = 0.0
    """How long no fault was on before it."""


def wait_for_quiet(running: Job, least_steps: int, before: set[int]) -> tuple[int, float]:
    """Until there were so many steps more and no finding for a while; or a minute has passed. Returns how
    many findings there were that do not concern ranks ``before``, those of the last fault, and how many
    seconds it was."""
    alarms = 0
    first, began = running.step(), time.monotonic()
    _, offset = running.findings(0)
    heard = began
    while time.monotonic() - began < 60.0:
        running.check()
        found, offset = running.findings(offset)
        if found:
            heard = time.monotonic()
            wrong = [each for each in found if not before & set(each["ranks"])]
            alarms += len(wrong)
            for each in wrong:
                _alarm(each)
        if running.step() - first >= least_steps and time.monotonic() - heard >= _QUIET_SECONDS:
            break
        time.sleep(0.2)
    return alarms, time.monotonic() - began


def trial(layout: Layout, running: Job, fault: Planned) -> Trial:
    """Make the fault and listen."""
    found = Trial(
        layout=layout.name, fault=fault.name, ranks=fault.ranks, causes=fault.causes, step=running.step()
    )
    _, offset = running.findings(0)
    began_unix, began = time.time(), time.monotonic()
    with fault.begin():
        while not found.right and not found.right_later:
            gone, trained = time.monotonic() - began, running.step() - found.step
            if gone > _LONGEST_WAIT or (gone > _WAIT and trained >= _WAIT_STEPS):
                break
            running.check()
            time.sleep(0.1)
            news, offset = running.findings(offset)
            for finding in news:
                _judge(found, finding, running, began_unix)
    found.began_unix, found.ended_unix, found.last_step = began_unix, time.time(), running.step()
    return found


def _judge(found: Trial, finding: dict[str, Any], running: Job, began: float) -> None:
    if finding["cause"] == "unknown" or finding["confidence"] < 0.5:
        return
    if finding["last_step"] < found.step:
        found.alarms_before += 1  # of steps before the fault: wrong, but no name for it
        _alarm(finding)
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


def _alarm(finding: dict[str, Any]) -> None:
    print(
        f"{time.strftime('%H:%M:%S')} an alarm without a fault: {finding['cause']} {finding['ranks']} steps "
        f"{finding['first_step']}-{finding['last_step']} ({finding['confidence']:.2f}): "
        f"{'; '.join(finding['evidence'])[:300]}",
        flush=True,
    )


def run_layout(layout: Layout, seed: int, scratch: Path, options: argparse.Namespace) -> list[Trial]:
    """One training run and its trials."""
    folder = (options.keep or scratch) / f"{layout.name}-{seed}"
    trials = []
    _remember(scratch / "data.bin")
    with (
        hosts(RANKS) as network,
        limits(RANKS, scratch, options.shares) as groups,
        job(layout, folder, scratch / "data", network, groups) as running,
    ):
        _wait_for_first_steps(running)
        groups.release(running.watcher())
        step_seconds = _step_seconds(running)
        planned = plan(layout, running, network, groups, seed, step_seconds)
        for fault in planned[: options.per_run]:
            before = set(trials[-1].ranks) if trials else set()
            alarms, quiet = wait_for_quiet(running, _QUIET_STEPS, before)
            if "reads" in fault.name:
                _forget(scratch / "data.bin")
            one = trial(layout, running, fault)
            one.alarms_before += alarms
            one.quiet_seconds = round(quiet, 1)
            trials.append(one)
            with open(folder / "trials.jsonl", "a") as file:
                file.write(json.dumps(asdict(one)) + "\n")
            late = "later" if one.right_later else "WRONG"
            mark = "right" if one.right else ("not named" if one.named_cause is None else late)
            print(
                f"{time.strftime('%H:%M:%S')} {layout.name} step {one.step}: {one.fault} of {one.ranks}: "
                f"{mark}: {one.named_cause} {one.named_ranks} after {one.seconds} s, {one.steps} steps "
                f"({one.confidence:.2f})",
                flush=True,
            )
    return trials


def _remember(path: Path) -> None:
    """Into memory: the run before may have made the system forget it, which is a fault of its own."""
    with open(path, "rb") as file:
        while file.read(1 << 22):
            pass


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


def _step_seconds(running: Job) -> float:
    """Of a few steps without a fault."""
    first, began = running.step(), time.monotonic()
    while running.step() - first < 4:
        running.check()
        time.sleep(0.02)
    return (time.monotonic() - began) / 4


def _shares(groups: dict[str, list[Trial]]) -> dict[str, dict[str, Any]]:
    """Per group how many were named rightly, and what was named."""
    return {
        name: {
            "trials": len(ones),
            "right": sum(one.right for one in ones),
            "right_in_time": sum(one.in_time for one in ones),
            "named": dict(Counter(str(one.named_cause) for one in ones)),
        }
        for name, ones in sorted(groups.items())
    }


def summary(trials: list[Trial]) -> dict[str, Any]:
    """Shares of all, per fault and per layout."""
    by_fault: dict[str, list[Trial]] = defaultdict(list)
    by_layout: dict[str, list[Trial]] = defaultdict(list)
    for one in trials:
        by_fault[one.fault].append(one)
        by_layout[one.layout].append(one)
    quiet = sum(one.quiet_seconds for one in trials)
    alarms = sum(one.alarms_before for one in trials)
    times = sorted(one.seconds for one in trials if one.right and one.seconds is not None)
    return {
        "trials": len(trials),
        "right": sum(one.right for one in trials),
        "right_in_time": sum(one.in_time for one in trials),
        "wrong": sum(one.named_cause is not None and not one.right for one in trials),
        "alarms_without_fault": alarms,
        "minutes_without_fault": round(quiet / 60, 1),
        "alarms_per_hour_without_fault": round(3600 * alarms / quiet, 1) if quiet else None,
        "unnamed": sum(one.named_cause is None for one in trials),
        "median_seconds": times[len(times) // 2] if times else None,
        "longest_seconds": times[-1] if times else None,
        "by_fault": _shares(by_fault),
        "by_layout": _shares(by_layout),
    }


def main() -> int:
    """Run the trials and print or record what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--per-run", type=int, default=9, help="most faults in one training run (9)")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument(
        "--load", type=float, default=0.5, help="share of a core that a niced load wants (0.5)"
    )
    parser.add_argument("--megabytes", type=int, default=512, help="size of the training data (512)")
    parser.add_argument("--minutes", type=float, default=35.0, help="begin no training run after so long")
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
        load = (
            f"their watcher (nice 10) and a process of nice 5 that wants {options.load:g} of a core"
            f"; load averages at the end {', '.join(f'{each:.1f}' for each in os.getloadavg())}"
        )
        _record(options, figures, trials, load)
    return 0


def _record(options: argparse.Namespace, figures: dict[str, Any], trials: list[Trial], load: str) -> None:
    rows, by_layout = (
        [
            [name, str(one["trials"]), str(one["right"]), str(one["right_in_time"]), str(one["named"])]
            for name, one in figures[key].items()
        ]
        for key in ("by_fault", "by_layout")
    )
    rows.append(["all", *(str(figures[key]) for key in ("trials", "right", "right_in_time")), ""])
    whole = {"machine": machine(), **figures, "each": [asdict(one) for one in trials]}
    columns = ["trials", "right", f"within {STEPS} steps and {SECONDS:g} s", "named"]
    tables = table(["fault", *columns], rows) + "\n\n" + table(["layout", *columns], by_layout)
    tables += (
        f"\n\n{figures['alarms_without_fault']} alarms in {figures['minutes_without_fault']} minutes of "
        f"training without a fault. Beside the ranks: {load}."
    )
    name, title = "scan-live", "Live faults, real ones, four Gloo ranks"
    if options.layouts != list(LAYOUTS):
        name, title = f"{name}-{'-'.join(options.layouts)}", f"{title}, {', '.join(options.layouts)}"
    for path in record(options.record, name, title, whole, tables):
        print(path)


if __name__ == "__main__":
    sys.exit(main())
