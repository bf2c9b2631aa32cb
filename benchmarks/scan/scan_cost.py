"""What tracing costs: nanoseconds per event, and the slow-down of a real training by paired blocks of steps.

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
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scan_event_cost import event_costs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # For the modules that all benchmarks share.

from recording import machine, record, table  # noqa: E402

HERE = Path(__file__).resolve().parent

CONTROL_PERCENT = 0.3
TARGETS = {"base": (0.5, 0.8), "full": (3.0, None)}
"""Percent: the estimate at most, and the upper end of its interval at most."""

BASE_PAIRS_OF_A_ROUND = 3
EVENT_PROCESSES = 9
RESAMPLES = 4_000
TRIMMED = 0.25
"""Share of the pairs that is left out on either side."""


def train(ranks: int, threads: int, arguments: list[str], timeout: float) -> dict[str, Any]:
    """What the workers measured: ``blocks`` of each rank (see ``scan_cost_worker.blocks``) and ``about``."""
    from mt_megatron.backends.distributed.rendezvous import loopback_store

    store, port = loopback_store()
    with tempfile.TemporaryDirectory(prefix="scan_cost_") as scratch:
        processes = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": str(threads),
            }
            command = [sys.executable, str(HERE / "scan_cost_worker.py"), scratch, *arguments]
            processes.append(subprocess.Popen(command, env=environment))
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        del store
        if any(codes):
            raise SystemExit(f"workers ended with {codes}")
        of_ranks = [json.loads(Path(scratch, f"blocks-{rank}.json").read_text()) for rank in range(ranks)]
    return {"blocks": [each["blocks"] for each in of_ranks], "about": of_ranks[0]["about"]}


def difference(blocks: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Percent by which the middle one of three ``blocks`` [pairs, 3] is larger than the others.

    Trimmed mean of the logarithms of its ratios to the one before and to the one after, with a 95 % bootstrap
    interval over the pairs. A ratio to the mean of both would be too small: times have one long tail, and the
    mean of two is rarely as short as one often is.
    """
    ratios = 100.0 * np.log(blocks[:, 1:2] / blocks[:, [0, 2]])
    slower = ratios.mean(axis=1)
    rng = np.random.default_rng(seed)
    drawn = [
        _trimmed_mean(ratios[rng.integers(0, len(ratios), size=len(ratios))].ravel())
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {
        "percent": float(_trimmed_mean(ratios.ravel())),
        "low": float(low),
        "high": float(high),
        "mean": float(slower.mean()),
        "median": float(np.median(slower)),
        "deviation": float(slower.std(ddof=1)),
        "pairs": len(slower),
    }


def _trimmed_mean(values: np.ndarray) -> np.ndarray:
    """Of the last axis, without the lowest and highest ``TRIMMED``."""
    cut = int(TRIMMED * values.shape[-1])
    ordered = np.sort(values, axis=-1)
    return np.asarray(ordered[..., cut : values.shape[-1] - cut].mean(axis=-1))


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
    """The figures of what ``train`` returned."""
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
        figures["training"] = judged(train(args.ranks, threads, arguments, args.timeout))
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
