"""Cost of FP8 telemetry: a measured step beside an unmeasured one, paired.

    python benchmarks/fp8/telemetry_cost.py [--hidden 1024 --layers 6 --tokens 2048] [--rounds 20]
        [--recipes tensorwise blockwise] [--record results/]
    python benchmarks/fp8/telemetry_cost.py --toy      # see that it runs

In every round a model takes three steps, in an order that turns: two without telemetry (an A/A control) and
one that is measured and recorded. The extra cost of the measured step divided by N is the cost of
``--fp8-telemetry-interval N``; without the option nothing is measured. Ratios are of steps of one round, of
this process's CPU seconds and of wall seconds.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from fp8_step import Side, flags_of
from recording import machine, median_interval, record, table

import mt_megatron
from mt_megatron.config.parse import load_config
from mt_megatron.fp8.state import states_of
from mt_megatron.training.distributed import joined
from mt_megatron.training.logging.fp8_records import Fp8Records

SIDES = {"off": 0, "off again": 0, "measured": 1}
"""Name -> telemetry interval of the step."""

INTERVALS = (10, 50, 100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--recipes", nargs="*", default=["tensorwise", "blockwise"])
    parser.add_argument("--cpu-bf16-products", default="torch", help="torch or fp32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, help="for each recipe: no further round after so many")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    if args.toy:
        args.hidden, args.layers, args.tokens, args.sequence, args.rounds = 64, 3, 64, 32, 3
        args.vocabulary = 4096
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    mt_megatron.patch(backend=args.backend)
    found: list[dict[str, Any]] = []
    args.extra = ["--no-first-last-layers-bf16"]
    plain = load_config(flags_of(args, None))
    with tempfile.TemporaryDirectory() as folder, joined(plain, mt_megatron.backend()) as job:
        for recipe in args.recipes:
            args.extra = ["--no-first-last-layers-bf16", "--fp8-telemetry-interval", "1"]
            side = Side(args, recipe, job)
            # Records are written, as in training.
            config = load_config([*flags_of(args, recipe), "--metrics-path", f"{folder}/metrics.jsonl"])
            Fp8Records(config, job, side.trainable.chunks, lambda line: None)
            [state] = states_of(side.trainable.chunks)
            side.step()
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
            started = time.monotonic()
            for round_ in range(args.rounds):
                if args.seconds is not None and time.monotonic() - started > args.seconds:
                    break
                order = list(SIDES)
                for name in order[round_ % 3 :] + order[: round_ % 3]:
                    state.options = replace(state.options, telemetry_interval=SIDES[name])
                    began = time.process_time()
                    seconds = side.step()
                    times[name].append((time.process_time() - began, seconds))
            del side, state
            gc.collect()
            row: dict[str, Any] = {"recipe": recipe, "rounds": len(times["off"])}
            for clock, index in (("CPU", 0), ("wall", 1)):
                for name in ("off again", "measured"):
                    ratios = [a[index] / b[index] for a, b in zip(times[name], times["off"], strict=True)]
                    row[f"{name}, {clock}"] = [round(each, 4) for each in median_interval(ratios)]
                row[f"seconds, {clock}"] = round(statistics.median(each[index] for each in times["off"]), 3)
            found.append(row)
            print(row, flush=True)
            for every in INTERVALS:
                extra, low, high = ((each - 1) / every for each in row["measured, CPU"])
                print(f"    every {every}: {extra:+.2%} ({low:+.2%} to {high:+.2%})")
    if args.record:
        cells = []
        for row in found:
            for clock in ("CPU", "wall"):
                extra = row[f"measured, {clock}"]
                texts = ["{:.3f} ({:.3f} to {:.3f})".format(*row[f"off again, {clock}"])]
                texts.append("{:.3f} ({:.3f} to {:.3f})".format(*extra))
                texts += [
                    f"{(extra[0] - 1) / every:+.2%} (at most {(extra[2] - 1) / every:+.2%})"
                    for every in INTERVALS
                ]
                cells.append([row["recipe"], str(row["rounds"]), clock, *texts])
        header = ["recipe", "rounds", "clock", "off again / off", "measured / off"]
        header += [f"cost of interval {every}" for every in INTERVALS]
        title = (
            f"FP8 telemetry: steps of {args.layers} layers of width {args.hidden}, {args.tokens} tokens; "
            f"medians over rounds, 95 % intervals"
        )
        record(
            args.record,
            "fp8-telemetry-cost",
            title,
            {
                "machine": machine(),
                "threads": torch.get_num_threads(),
                "cpu_bf16_products": args.cpu_bf16_products,
                "results": found,
            },
            table(header, cells),
        )


if __name__ == "__main__":
    main()
