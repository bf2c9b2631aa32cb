"""Cost of tracing: nanoseconds per event, and the slow-down of a real training by paired blocks of steps.

    python benchmarks/scan/scan_cost.py --only events
    python benchmarks/scan/scan_cost.py [--ranks 2] [--pairs 1200] [--record results/]

One training, by our own trainer, is traced in some blocks of its steps, in one set of processes: between two
untraced blocks comes one at level base or one that is not traced either, in random order, and later one at
level full (a third as many). The ranks are data-parallel, as the launch scripts' on a CPU; ``--layout tp``
has ranks that exchange activations, and whose steps on two cores differ far more from one to the next.

A pair is such a block and the two around it, so that what drifts over seconds cancels. The pairs
without tracing are the control: where they differ by more than 0.3 %, the machine is too restless and the
result is inconclusive. Between blocks the tracing is held still (``scan_cost_held.py``). The process that
watches the files has a core of its own in a real job; it is left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scan_event_cost import event_costs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # For the modules that all benchmarks share.

from paired_blocks import difference, ranks_of  # noqa: E402
from recording import machine, record, table  # noqa: E402

HERE = Path(__file__).resolve().parent

CONTROL_PERCENT = 0.3
TARGETS = {"base": (0.5, 0.8), "full": (3.0, None)}
"""Percent: the estimate at most, and the upper end of its interval at most."""

BASE_PAIRS_OF_A_ROUND = 3
EVENT_PROCESSES = 9


def verdicts(found: dict[str, dict[str, float]]) -> dict[str, str]:
    """Per level: met, missed, or inconclusive."""
    control = found["off again"]["percent"]
    said = {}
    for level, (most, upper) in TARGETS.items():
        estimate, high = found[level]["percent"], found[level]["high"]
        if abs(control) > CONTROL_PERCENT:
            said[level] = f"inconclusive: the control differs by {control:+.2f} %"
        elif estimate <= most and (upper is None or high <= upper):
            said[level] = "met"
        else:
            said[level] = "missed"
    return said


def judged(ran: dict[str, Any]) -> dict[str, Any]:
    """The figures of what ``ranks_of`` returned."""
    # [ranks, pairs, before and own and after, wall and processor and background]
    arrays = {arm: np.array([blocks[arm] for blocks in ran["blocks"]]) for arm in ran["blocks"][0]}
    found = {arm: difference(each[0, ..., 0]) for arm, each in arrays.items()}
    own = {arm: 1e3 * float(each[:, :, 1, 2].sum() / each[:, :, 1, 0].sum()) for arm, each in arrays.items()}
    return {
        **ran["about"],
        "differences": found,
        "processor_time": {arm: difference(each[..., 1].mean(axis=0)) for arm, each in arrays.items()},
        "background_ms_per_s": own,
        "verdicts": verdicts(found),
        "seconds": {arm: each[0, ..., 0].round(6).tolist() for arm, each in arrays.items()},
    }


def training_table(figures: dict[str, Any]) -> str:
    """``judged`` as Markdown."""
    found, used = figures["differences"], figures["processor_time"]
    rows = [
        (
            arm,
            f"{found[arm]['percent']:+.2f}",
            f"{found[arm]['low']:+.2f} to {found[arm]['high']:+.2f}",
            f"{found[arm]['median']:+.2f}, {found[arm]['mean']:+.2f}",
            f"{used[arm]['percent']:+.2f} ({used[arm]['low']:+.2f} to {used[arm]['high']:+.2f})",
            f"{figures['background_ms_per_s'][arm]:.2f}",
            f"{figures['events_per_step'].get(arm, 0):.0f}",
            figures["verdicts"].get(arm, "control"),
        )
        for arm in found
    ]
    header = (
        *("level", "slower, %", "95 %", "median, mean", "processor time, %"),
        *("background, ms/s of a rank", "events/step", "verdict"),
    )
    where = ", each on a core of its own" if figures["pinned"] else ""
    about = (
        f"{figures['layout']}: {figures['ranks']} process(es) of {figures['threads']} thread(s){where}; "
        f"{found['base']['pairs']} pairs ({found['full']['pairs']} at level full); blocks "
        f"of {figures['steps_per_block']} step(s); a step takes {1e3 * figures['step_seconds']:.0f} ms."
    )
    if figures["unrest_percent"]:
        free, pinned = figures["unrest_percent"]["free"], figures["unrest_percent"]["pinned"]
        about += (
            f" Chosen beforehand on untraced steps, which differ from their neighbours by {free:.1f} % with "
            f"the processes on any core and by {pinned:.1f} % with each on its own."
        )
    return f"{table(header, rows)}\n\n{about}"


def main() -> int:
    """Measure, print, record; 0 when everything was met or only the events were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("events", "training"))
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--layout", choices=("dp", "tp"), default="dp", help="how they share the work (dp)")
    parser.add_argument("--threads", type=int, help="of each process; the cores are shared out by default")
    parser.add_argument(
        "--pin",
        choices=("auto", "yes", "no"),
        default="auto",
        help="each process on a core of its own; auto: where untraced steps then differ less",
    )
    parser.add_argument("--pairs", type=int, default=1200, help="at level base, and of the control (1200)")
    parser.add_argument("--block-seconds", type=float, default=0.1, help="in whole steps, one at least (0.1)")
    parser.add_argument("--timeout", type=float, default=3600.0)
    parser.add_argument("--record", type=Path, help="folder for a dated record")
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": machine()}
    parts = []
    if args.only != "training":
        costs = event_costs(EVENT_PROCESSES)
        figures["nanoseconds_per_event"] = costs
        rows = [(name, *(f"{each[key]:.0f}" for key in each)) for name, each in costs.items()]
        header = ("ns per event", "cheapest burst", "median burst", "of the slowest process")
        parts.append(f"{table(header, rows)}\n\n{EVENT_PROCESSES} processes, one after the other.")
        print(parts[-1], flush=True)
    met = True
    if args.only != "events":
        rounds = -(-args.pairs // BASE_PAIRS_OF_A_ROUND)
        arguments = [f"--rounds={rounds}", f"--block-seconds={args.block_seconds}", f"--pin={args.pin}"]
        arguments.append(f"--layout={args.layout}")
        threads = args.threads or max(1, (os.cpu_count() or 1) // args.ranks)
        figures["training"] = judged(
            ranks_of(HERE / "scan_cost_worker.py", args.ranks, threads, arguments, args.timeout)
        )
        parts.append(training_table(figures["training"]))
        print(parts[-1])
        met = all(each == "met" for each in figures["training"]["verdicts"].values())
    if args.record:
        title, name = "What tracing costs", "scan-event-cost" if args.only == "events" else "scan-cost"
        for path in record(args.record, name, title, figures, "\n\n".join(parts)):
            print(path)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
