"""Seconds of a linear's forward and backward pass under each recipe beside bf16, interleaved: casts, saved
inputs and the three products together, as training runs them.

    python benchmarks/fp8_linear.py [--backend cuda] [--shape 16384x8192x7168] [--rounds 10]
        [--record results/]
    python benchmarks/fp8_linear.py --backend cpu --toy     # sees that it runs; the cpu emulates
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from recording import machine, record, table

import mt_megatron
from mt_megatron.fp8.linear import Fp8Linear
from mt_megatron.fp8.recipe import PRESETS, possible_recipes
from mt_megatron.fp8.state import Fp8State, Options


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--shape", default="16384x8192x7168", help="tokens x outputs x inputs")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--record", type=Path, help="directory for a dated JSON and Markdown file")
    args = parser.parse_args()
    if args.toy:
        args.shape, args.rounds = "64x128x256", 3
    mt_megatron.patch(backend=args.backend)
    from megatron.core.tensor_parallel.layers import (
        LinearWithGradAccumulationAndAsyncCommunication as TensorParallelLinear,
    )

    backend = mt_megatron.backend()
    tokens, outputs, inputs = map(int, args.shape.split("x"))
    names = ["bf16", *possible_recipes(backend.name, backend.fp8_granularities())]
    states, weights = {}, {}
    for name in names:
        weights[name] = torch.nn.Parameter(
            torch.randn(
                outputs, inputs, dtype=torch.bfloat16, device=backend.device(backend.current_device())
            )
        )
        if name == "bf16":
            continue
        state = states[name] = Fp8State(PRESETS[name], Options())
        state.kernels = "reference" if backend.name == "cpu" else "scaled_mm"
        linear = Fp8Linear(state, "layers.0.linear", weights[name])
        state.add(linear)
        weights[name].gemm_recipe = linear  # type: ignore[attr-defined]
    x = torch.randn(
        tokens,
        inputs,
        dtype=torch.bfloat16,
        device=backend.device(backend.current_device()),
        requires_grad=True,
    )
    grad = torch.randn(tokens, outputs, dtype=torch.bfloat16, device=backend.device(backend.current_device()))

    def step(name: str) -> None:
        output = TensorParallelLinear.apply(x, weights[name], None, False, False, False, None, 0)
        output.backward(grad)
        x.grad = weights[name].grad = None

    print("emulated" if backend.name == "cpu" else backend.device_name(backend.current_device()))
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(args.rounds + 1):
        for name in names:
            backend.synchronize()
            began = time.perf_counter()
            step(name)
            backend.synchronize()
            if round_:
                times[name].append(time.perf_counter() - began)
    rows = []
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, times["bf16"], strict=True))
        rate = 6 * tokens * outputs * inputs / statistics.median(found) / 1e12
        rows.append([name, f"{statistics.median(found):.6f}", f"{rate:.3f}", f"{ratio:.3f}"])
        print(f"{args.shape} {name:<14} {rate:9.3f} TFLOP/s  {ratio:6.3f} of bf16's time")
    if args.record is not None:
        header = ["recipe", "seconds", "TFLOP/s", "of bf16's time"]
        title = f"FP8 linear {args.shape}, forward and backward" + (", emulated" * (backend.name == "cpu"))
        figures = {
            "machine": {**machine(), "device": backend.device_name(backend.current_device())},
            "shape": args.shape,
        }
        figures["rows"] = [dict(zip(header, row, strict=True)) for row in rows]
        record(args.record, f"fp8-linear-{backend.name}", title, figures, table(header, rows))


if __name__ == "__main__":
    main()
