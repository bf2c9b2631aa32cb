"""What tracing costs: nanoseconds per event, and the slow-down of a real training by paired blocks of steps.

    python benchmarks/scan_cost.py --only events
    python benchmarks/scan_cost.py [--ranks 2] [--pairs 400] [--record results/]

One training, by our own trainer, is traced and not traced in turn, in one set of processes: a visit starts
(or does not start) everything that ``--scan`` starts in a rank, runs until the background thread has its
rhythm, and times blocks of steps. A round visits off, off again, base and full in random order; a block is
paired with the block of the same place in the round's first visit to off. The second visit to off is the
control: where its difference lies outside +-0.3 %, the machine is too restless and the result is
inconclusive. The process that watches the files runs beside rank 0 on a machine of its own cores and is
left out.
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
from recording import machine, record, table
from scan_event_cost import event_costs

HERE = Path(__file__).resolve().parent

CONTROL_PERCENT = 0.3
TARGETS = {"base": (0.5, 0.8), "full": (3.0, None)}
"""Percent: the estimate at most, and the upper end of its interval at most."""

RESAMPLES = 10_000


def train(ranks: int, threads: int, arguments: list[str], timeout: float) -> dict[str, Any]:
    """The workers' blocks: seconds per arm, shape (rounds, blocks of a visit)."""
    from mt_megatron.backends.rendezvous import loopback_store

    store, port = loopback_store()
    with tempfile.TemporaryDirectory(prefix="scan_cost_") as scratch:
        processes = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "PYTHONPATH": f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
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
        found: dict[str, Any] = json.loads(Path(scratch, "blocks.json").read_text())
    return found


def difference(blocks: dict[str, list[list[float]]], arm: str, seed: int = 0) -> dict[str, float]:
    """Percent by which ``arm`` is slower than ``off``: interquartile mean over the pairs of blocks, with a
    95 % bootstrap interval over rounds (blocks of one visit are not independent)."""
    off, on = np.array(blocks["off"]), np.array(blocks[arm])
    slower = 100.0 * (on / off - 1.0)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(slower), size=(RESAMPLES, len(slower)))
    resampled = np.array([_interquartile_mean(slower[rounds].ravel()) for rounds in drawn])
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {
        "percent": _interquartile_mean(slower.ravel()),
        "low": float(low),
        "high": float(high),
        "mean": float(slower.mean()),
        "median": float(np.median(slower)),
        "pairs": slower.size,
    }


def _interquartile_mean(values: np.ndarray) -> float:
    ordered = np.sort(values)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


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


def main() -> int:
    """Measure, print, record; 0 when everything was met or only the events were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("events", "training"))
    parser.add_argument("--ranks", type=int, default=2, help="processes, one tensor parallel group")
    parser.add_argument("--threads", type=int, help="of each process; the cores are shared out by default")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=4, help="timed blocks of a visit")
    parser.add_argument("--block-seconds", type=float, default=0.3)
    parser.add_argument("--timeout", type=float, default=3600.0)
    parser.add_argument("--record", type=Path, help="folder for a dated record")
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": machine()}
    parts = []
    if args.only != "training":
        costs = event_costs()
        figures["nanoseconds_per_event"] = costs
        rows = [(name, f"{each['cheapest']:.0f}", f"{each['median']:.0f}") for name, each in costs.items()]
        parts.append(table(("ns per event", "cheapest burst", "median burst"), rows))
        print(parts[-1])
    met = True
    if args.only != "events":
        rounds = -(-args.pairs // args.blocks)
        arguments = [f"--rounds={rounds}", f"--blocks={args.blocks}", f"--block-seconds={args.block_seconds}"]
        threads = args.threads or max(1, (os.cpu_count() or 1) // args.ranks)
        ran = train(args.ranks, threads, arguments, args.timeout)
        arms = ("off again", "base", "full")
        found = {arm: difference(ran["seconds"], arm) for arm in arms}
        used = {arm: difference(ran["processor_seconds"], arm) for arm in arms}
        said = verdicts(found)
        figures |= {
            "training": {**ran["about"], "differences": found, "processor_time": used, "verdicts": said}
        }
        rows = [
            (
                arm,
                f"{found[arm]['percent']:+.2f}",
                f"{found[arm]['low']:+.2f} to {found[arm]['high']:+.2f}",
                f"{found[arm]['mean']:+.2f}",
                f"{used[arm]['percent']:+.2f} ({used[arm]['low']:+.2f} to {used[arm]['high']:+.2f})",
                f"{ran['about']['events_per_second'].get(arm, 0):.0f}",
                said.get(arm, "control"),
            )
            for arm in arms
        ]
        header = (
            *("level", "slower, %", "95 %", "plain mean, %"),
            *("processor time of rank 0, %", "events/s of a rank", "verdict"),
        )
        parts.append(table(header, rows))
        about = ran["about"]
        parts.append(
            f"{args.ranks} process(es), {found['base']['pairs']} pairs of blocks of "
            f"{about['steps_per_block']} steps; a step takes {1e3 * about['step_seconds']:.0f} ms."
        )
        print("\n".join(parts[-2:]))
        met = all(each == "met" for each in said.values())
    if args.record:
        title = "What tracing costs"
        for path in record(args.record, "scan-cost", title, figures, "\n\n".join(parts)):
            print(path)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
