"""Seconds and error of one product of a linear under each recipe beside bf16, interleaved.

    python benchmarks/fp8_gemm.py [--backend cuda] [--shapes 16384x8192x7168 ...] [--rounds 20]
        [--record results/]
    python benchmarks/fp8_gemm.py --backend cpu --toy     # sees that it runs; the cpu emulates

Casts are timed apart from the product. TFLOP/s count two operations per multiply-add.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from recording import machine, record, table

import mt_megatron
from mt_megatron.fp8.products import reference, scaled_mm
from mt_megatron.fp8.quantise import quantise
from mt_megatron.fp8.recipe import CONTRACTED, PRESETS, ROLES, possible_recipes
from mt_megatron.seams.gemm import torch_gemm


def seconds(run: Callable[[], object], synchronize: Callable[[], None]) -> float:
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--shapes", nargs="*", default=["16384x8192x7168"], help="tokens x outputs x inputs")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--record", type=Path, help="directory for a dated JSON and Markdown file")
    args = parser.parse_args()
    if args.toy:
        args.shapes, args.rounds = ["64x128x256"], 3
    mt_megatron.patch(backend=args.backend)
    backend = mt_megatron.backend()
    compute = reference if backend.name == "cpu" else scaled_mm
    print("emulated" if backend.name == "cpu" else backend.device_name(backend.current_device()))
    rows = []
    for text in args.shapes:
        tokens, outputs, inputs = map(int, text.split("x"))
        made = {
            "input": torch.randn(tokens, inputs),
            "weight": torch.randn(outputs, inputs),
            "grad": torch.randn(tokens, outputs),
        }
        made = {
            name: x.to(backend.device(backend.current_device()), torch.bfloat16) for name, x in made.items()
        }
        for role in ROLES:
            kinds = {"fprop": ("input", "weight"), "dgrad": ("grad", "weight"), "wgrad": ("grad", "input")}[
                role
            ]
            a, b = (made[kind] for kind in kinds)
            along = CONTRACTED[role]
            sides: dict[str, Callable[[], object]] = {"bf16": lambda r=role, a=a, b=b: torch_gemm(r, a, b)}
            casts: dict[str, Callable[[], object]] = {}
            for name in possible_recipes(backend.name, backend.fp8_granularities()):
                product = PRESETS[name].product(role)
                if not product.quantised:
                    continue

                def cast(p=product, a=a, b=b, along=along) -> object:  # type: ignore[no-untyped-def]
                    return quantise(a, p.a, along[0]), quantise(b, p.b, along[1])

                qa, qb = cast()  # type: ignore[misc]
                qa.values(torch.bfloat16), qb.values(torch.bfloat16)
                casts[name] = cast
                sides[name] = lambda r=role, p=product, qa=qa, qb=qb: compute(r, qa, qb, p, torch.bfloat16)
            times: dict[str, list[float]] = {name: [] for name in sides}
            cast_times: dict[str, list[float]] = {name: [] for name in casts}
            for _ in range(args.rounds):
                for name, run in sides.items():
                    times[name].append(seconds(run, backend.synchronize))
                for name, run in casts.items():
                    cast_times[name].append(seconds(run, backend.synchronize))
            expected = sides["bf16"]().float()  # type: ignore[attr-defined]
            for name, found in times.items():
                ratio = statistics.median(x / y for x, y in zip(found, times["bf16"], strict=True))
                error = (sides[name]().float() - expected).norm() / expected.norm()  # type: ignore[attr-defined]
                rate = 2 * tokens * outputs * inputs / statistics.median(found) / 1e12
                casting = statistics.median(cast_times[name]) * 1e3 if name in cast_times else 0.0
                print(
                    f"{text} {role} {name:<14} {rate:9.3f} TFLOP/s  {ratio:6.3f} of bf16's time  both casts "
                    f"{casting:8.3f} ms  relative difference {float(error):.4f}"
                )
                figures = (f"{rate:.3f}", f"{ratio:.3f}", f"{casting:.3f}", f"{float(error):.4f}")
                rows.append([text, role, name, *figures])
    if args.record is not None:
        header = ["shape", "role", "recipe", "TFLOP/s", "of bf16's time", "both casts, ms", "difference"]
        title = "FP8 products beside bf16" + (", emulated" * (backend.name == "cpu"))
        content = {
            "machine": {**machine(), "device": backend.device_name(backend.current_device())},
            "rows": [dict(zip(header, row, strict=True)) for row in rows],
        }
        record(args.record, f"fp8-gemm-{backend.name}", title, content, table(header, rows))


if __name__ == "__main__":
    main()
