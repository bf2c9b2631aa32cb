"""What watching costs a real training, by paired blocks of two steps.

    python benchmarks/scope/cost.py [--ranks 2] [--layout dp] [--rounds 150] [--record results/]

One training, by our own trainer, in one set of processes: between two unwatched blocks comes one of another
kind, in random order: not watched either (the control), watched without a sampled step, with the default
statistics in its first step, or with a layer's attention in both. A pair is such a block and the two around
it. A block ends when what it sends is encoded, so that nothing of it is left to the next. What the sidecar
does with it has a core of its own in a real job and is left out: frames go to a process that drops them.

At an interval of 20 steps a twentieth of the steps costs what a sampled one does and the others what an
unsampled one does; the upper bound adds up those of both.
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

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "scan")]

from recording import machine, record, table  # noqa: E402
from scan_cost import difference  # noqa: E402

CONTROL_PERCENT = 0.5
INTERVAL = 20
TARGETS = {"default, every 20 steps": 1.0, "attention live": 5.0}
"""Percent, the upper end of the 95 % interval at most."""


def train(ranks: int, threads: int, arguments: list[str], timeout: float) -> dict[str, Any]:
    """What the workers measured: ``blocks`` of each rank, and ``about``."""
    from mt_megatron.backends.distributed.rendezvous import loopback_store

    store, port = loopback_store()
    with tempfile.TemporaryDirectory(prefix="scope_cost_") as scratch:
        processes = []
        for rank in range(ranks):
            path = f"{HERE.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            environment = {
                **os.environ,
                "PYTHONPATH": path,
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
            command = [sys.executable, str(HERE / "cost_worker.py"), scratch, *arguments]
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


def judged(ran: dict[str, Any]) -> dict[str, Any]:
    """The figures of what ``train`` returned."""
    arrays = {arm: np.array([blocks[arm] for blocks in ran["blocks"]]) for arm in ran["blocks"][0]}
    found = {arm: difference(each[0, ..., 0]) for arm, each in arrays.items()}
    others = (INTERVAL - 2) / INTERVAL
    # Its blocks hold two steps of the interval: the sampled one and the one after.
    found["default, every 20 steps"] = {
        key: found["sampled"][key] * 2 / INTERVAL + max(found["unsampled"][key], 0.0) * others
        for key in ("percent", "high")
    }
    found["attention live"] = {key: found["attention"][key] for key in ("percent", "high")}
    control = found["off again"]["percent"]
    verdicts = {}
    for name, most in TARGETS.items():
        restless = abs(control) > CONTROL_PERCENT
        verdicts[name] = "met" if found[name]["high"] <= most else "missed"
        verdicts[name] = (
            f"inconclusive: the control differs by {control:+.2f} %" if restless else verdicts[name]
        )
    return {
        **ran["about"],
        "differences": found,
        "processor_time": {arm: difference(each[..., 1].mean(axis=0)) for arm, each in arrays.items()},
        "verdicts": verdicts,
        "seconds": {arm: each[0, ..., 0].round(6).tolist() for arm, each in arrays.items()},
    }


def shown(figures: dict[str, Any]) -> str:
    """``judged`` as Markdown."""
    found, used = figures["differences"], figures["processor_time"]
    rows = [
        (
            f"{arm}, blocks of 2 steps",
            f"{found[arm]['percent']:+.2f}",
            f"{found[arm]['low']:+.2f} to {found[arm]['high']:+.2f}",
            f"{used[arm]['percent']:+.2f} ({used[arm]['low']:+.2f} to {used[arm]['high']:+.2f})",
            f"{found[arm]['pairs']}",
            "control" if arm == "off again" else "",
        )
        for arm in used
    ]
    rows += [
        (
            name,
            f"{found[name]['percent']:+.2f}",
            f"at most {found[name]['high']:+.2f}",
            "",
            "",
            f"{figures['verdicts'][name]} (at most {most:g} %)",
        )
        for name, most in TARGETS.items()
    ]
    header = ("", "slower, %", "95 %", "processor time, %", "pairs", "verdict")
    where = ", each on a core of its own" if figures["pinned"] else ""
    about = (
        f"{figures['shape']}, {figures['layout']}: {figures['ranks']} process(es) of {figures['threads']} "
        f"thread(s){where}; a step of {figures['tokens_per_step']} tokens takes "
        f"{1e3 * figures['step_seconds']:.0f} ms. What takes the frames is {figures['sidecar']}."
    )
    return f"{table(header, rows)}\n\n{about}"


def main() -> int:
    """Measure, print, record; 0 when everything was met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--layout", choices=("dp", "tp"), default="dp", help="how they share the work (dp)")
    parser.add_argument("--threads", type=int, help="of each process; the cores are shared out by default")
    parser.add_argument("--pin", choices=("auto", "yes", "no"), default="auto", help="processes on own cores")
    parser.add_argument(
        "--sidecar",
        choices=("drained", "frozen", "dead"),
        default="drained",
        help="what takes the frames: a process that drops them, one that is stopped, or none (drained)",
    )
    parser.add_argument("--rounds", type=int, default=150, help="of five blocks and as many unwatched ones")
    parser.add_argument("--timeout", type=float, default=3600.0)
    parser.add_argument("--record", type=Path, help="folder for a dated record")
    args = parser.parse_args()
    threads = args.threads or max(1, (os.cpu_count() or 1) // args.ranks)
    arguments = [f"--rounds={args.rounds}", f"--pin={args.pin}", f"--layout={args.layout}"]
    arguments.append(f"--sidecar={args.sidecar}")
    figures = {"machine": machine(), "training": judged(train(args.ranks, threads, arguments, args.timeout))}
    text = shown(figures["training"])
    print(text)
    if args.record:
        name = "scope-cost" if args.sidecar == "drained" else f"scope-cost-{args.sidecar}"
        for path in record(args.record, name, "What watching costs", figures, text):
            print(path)
    return 0 if all(each == "met" for each in figures["training"]["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
