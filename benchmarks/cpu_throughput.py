"""Tokens per second of our trainer on a CPU beside stock ``transformers`` and the matrix products alone.

    python benchmarks/cpu_throughput.py [--shapes ...] [--dtypes ...] [--rounds 3] [--record results/]
    python benchmarks/cpu_throughput.py --spread      # two processes beside one with two threads

Every side is a process of two threads (or two processes of one thread) that does one optimizer step of
4,096 tokens when it is told to, strictly one side after the other; ratios are of the same round. All
use SDPA or an equal, a fused AdamW, clipping at 1.0 and, in bf16, fp32 master weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recording import machine, record, spread, table
from throughput_sides import SHAPES

HERE = Path(__file__).resolve().parent
HEAVY = ["vocabulary-heavy", "layer-heavy"]
SIDES = ("ours", "stock", "compiled", "gemm")
TOKENS = 4096
TARGETS = {
    "float32": {"vocabulary-heavy": 1.0, "layer-heavy": 1.1},
    "bfloat16": {"vocabulary-heavy": 1.3, "layer-heavy": 1.3},
}
AIMS = {"float32": 0.85, "bfloat16": 0.60}
TWO_PROCESSES = 0.85


class Side:
    """A contender: one process, or two that find each other over loopback."""

    def __init__(self, name: str, shape: str, dtype: str, *, processes: int, extra: Sequence[str]) -> None:
        self._logs = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (closed by close)
        self._store: Any = None
        environments: list[dict[str, str]] = [{}]
        if processes > 1:
            sys.path.insert(0, str(HERE.parent))
            from mt_megatron.backends.distributed.rendezvous import loopback_store

            self._store, port = loopback_store()
            environments = [
                {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
                | {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
                | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
                for rank in range(processes)
            ]
        threads = str(max(1, 2 // processes))
        command = [sys.executable, str(HERE / "throughput_worker.py"), "--side", name, "--shape", shape]
        command += ["--dtype", dtype, "--threads", threads, *extra]
        path = f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._logs,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads, **environment},
            )
            for environment in environments
        ]

    def ready(self) -> dict[str, Any]:
        """Wait until it is warm; what it says of itself."""
        return self._answers()[0]

    def step(self, clock: str = "seconds") -> float:
        """Seconds of one step, of the slowest process: by the wall, or ``cpu``: of its processors."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return max(answer[clock] for answer in self._answers())

    def _answers(self) -> list[dict[str, Any]]:
        lines = []
        for process in self._processes:
            assert process.stdout is not None
            lines.append(process.stdout.readline())
        if not all(lines):
            self._logs.seek(0)
            raise SystemExit(f"a contender ended: {self._logs.read()[-3000:]}")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End its processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._logs.close()


def measure(
    sides: dict[str, int],
    shape: str,
    dtype: str,
    rounds: int,
    extra: Sequence[str],
    clock: str = "seconds",
) -> dict[str, list[float]]:
    """Seconds per step by side, one per round; ``sides`` maps names to numbers of processes."""
    running: dict[str, Side] = {}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for name, processes in sides.items():
            running[name] = Side(name, shape, dtype, processes=processes, extra=extra)
            # One after the other: a warm-up that competes may choose another way to compute.
            running[name].ready()
        names = list(sides)
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                seconds[name].append(running[name].step(clock))
    finally:
        for side in running.values():
            side.close()
    return seconds


def ratios(seconds: dict[str, list[float]], over: str, under: str) -> dict[str, float]:
    """How many times faster ``under`` was than ``over``, round by round."""
    return spread([a / b for a, b in zip(seconds[over], seconds[under], strict=True)])


def _text(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f})"


def against_stock(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Ours, stock, compiled and the matrix products, for every shape and dtype."""
    cases, rows = [], []
    sides = {name: 1 for name in SIDES if args.compile or name != "compiled"}
    for shape in args.shapes:
        for dtype in args.dtypes:
            seconds = measure(sides, shape, dtype, args.rounds, args.extra)
            case: dict[str, Any] = {"shape": shape, "dtype": dtype, "seconds": seconds}
            case["tokens_per_second"] = {n: TOKENS / spread(s)["median"] for n, s in seconds.items()}
            case["over_stock"] = ratios(seconds, "stock", "ours")
            case["bound_over_stock"] = ratios(seconds, "stock", "gemm")
            case["share_of_bound"] = ratios(seconds, "gemm", "ours")
            case["target"], case["aim"] = TARGETS[dtype].get(shape, 0.0), AIMS[dtype]
            row = [SHAPES[shape]["name"], dtype, *(f"{v:,.0f}" for v in case["tokens_per_second"].values())]
            row += [f"{_text(case['over_stock'])} >= {case['target']}"]
            if args.compile:
                case["over_compiled"] = ratios(seconds, "compiled", "ours")
                row += [f"{_text(case['over_compiled'])} >= 1.0"]
            row += [_text(case["bound_over_stock"]), f"{_text(case['share_of_bound'])}, aim {case['aim']}"]
            cases.append(case)
            rows.append(row)
            print(" ".join(row), flush=True)
    header = ["shape", "dtype", *(f"{name} tokens/s" for name in sides), "ours / stock"]
    header += ["ours / compiled"] if args.compile else []
    header += ["GEMMs alone / stock", "ours / GEMMs alone"]
    return {"cases": cases}, table(header, rows)


def against_one_process(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Two processes of one thread beside one process of two threads."""
    cases, rows = [], []
    sides = {"ours": 1, "tp2": 2, "tp2_sp": 2, "dp2": 2}
    for shape in args.shapes:
        for dtype in args.dtypes:
            seconds = measure(sides, shape, dtype, args.rounds, args.extra)
            case: dict[str, Any] = {"shape": shape, "dtype": dtype, "seconds": seconds}
            row = [SHAPES[shape]["name"], dtype, f"{TOKENS / spread(seconds['ours'])['median']:,.0f}"]
            for name in list(sides)[1:]:
                case[name] = ratios(seconds, "ours", name)
                row.append(f"{_text(case[name])} >= {TWO_PROCESSES}")
            cases.append(case)
            rows.append(row)
            print(" ".join(row), flush=True)
    return {"cases": cases}, table(["shape", "dtype", "one process, tokens/s", *list(sides)[1:]], rows)


def main() -> None:
    """Measure, print a table, and write it down where ``--record`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=HEAVY)
    parser.add_argument("--dtypes", nargs="+", choices=list(AIMS), default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    parser.add_argument("--spread", action="store_true", help="two processes beside one")
    parser.add_argument("--micro-batches", type=int, default=1, help="gradient accumulation, same tokens")
    parser.add_argument("--record", type=Path, help="directory for a dated JSON and Markdown file")
    args = parser.parse_args()
    args.extra = ["--micro-batches", str(args.micro_batches)]
    about = machine()
    name, run = (
        ("cpu-two-processes", against_one_process) if args.spread else ("cpu-throughput", against_stock)
    )
    figures, tables = run(args)
    print(f"\n{tables}")
    if args.record is not None:
        title = "Two processes beside one" if args.spread else "Training on a CPU beside stock transformers"
        for path in record(
            args.record, name, title, {"machine": about, "rounds": args.rounds, **figures}, tables
        ):
            print(path)


if __name__ == "__main__":
    main()
