"""Tokens per second of our trainer beside stock ``transformers`` Mixtral, on a CPU.

    python benchmarks/mixtral_step.py [--shapes ...] [--dtypes ...] [--rounds 5] [--record results/]

One optimizer step of 4,096 tokens (s512) as in ``cpu_throughput.py``: a process of two threads for each side,
one after the other in every round, ratios of the same round. Stock runs its grouped and its eager experts
(its batched ones gather a copy of an expert for every row, 30 GB here); ours is compared with the faster.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cpu_throughput import TOKENS, _text, measure, ratios
from recording import machine, record, spread, table
from throughput_sides import SHAPES

SIDES = ("ours", "ours_sequential", "stock_grouped", "stock_eager")
AIM = 1.2


def compare(shape: str, dtype: str, rounds: int, clock: str) -> dict[str, Any]:
    """Every side's seconds, and how many times faster ours is than the faster stock one."""
    seconds = measure(dict.fromkeys(SIDES, 1), shape, dtype, rounds, [], clock)
    medians = {name: spread(each)["median"] for name, each in seconds.items()}
    best = min(("stock_grouped", "stock_eager"), key=lambda name: medians[name])
    return {
        "shape": shape,
        "dtype": dtype,
        "seconds": seconds,
        "tokens_per_second": {name: TOKENS / each for name, each in medians.items()},
        "fastest_stock": best,
        "over_stock": ratios(seconds, best, "ours"),
        "over_sequential": ratios(seconds, "ours_sequential", "ours"),
        "aim": AIM,
    }


def main() -> None:
    """Measure, print a table, and write it down where ``--record`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", choices=[n for n in SHAPES if SHAPES[n].get("experts")], default=["mixtral"]
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--clock", choices=("seconds", "cpu"), default="seconds", help="the wall's time or the processors'"
    )
    parser.add_argument("--record", type=Path, help="directory for a dated JSON and Markdown file")
    args = parser.parse_args()
    about = machine()
    cases, rows = [], []
    for shape in args.shapes:
        for dtype in args.dtypes:
            case = compare(shape, dtype, args.rounds, args.clock)
            cases.append(case)
            speeds = [f"{case['tokens_per_second'][name]:,.0f}" for name in SIDES]
            faster = f"{_text(case['over_stock'])} >= {AIM} ({case['fastest_stock']})"
            rows.append([SHAPES[shape]["name"], dtype, *speeds, faster, _text(case["over_sequential"])])
            print(" ".join(rows[-1]), flush=True)
    header = ["shape", "dtype", *(f"{name} tokens/s" for name in SIDES)]
    tables = table([*header, "ours / faster stock", "ours / ours with SequentialMLP"], rows)
    print(f"\n{tables}")
    if args.record is not None:
        figures = {"machine": about, "rounds": args.rounds, "clock": args.clock, "cases": cases}
        title = "A Mixtral-shaped step on a CPU beside stock transformers"
        for path in record(args.record, "mixtral-step", title, figures, tables):
            print(path)


if __name__ == "__main__":
    main()
