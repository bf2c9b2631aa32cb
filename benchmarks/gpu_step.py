"""One training step of a Llama-8B-shaped stack of layers on one device: MFU and where the time goes.

    python benchmarks/gpu_step.py [--backend auto] [--layers 4] [--sequence 8192] [--record results/]
    python benchmarks/gpu_step.py --backend cpu --tiny        # tries the script, says nothing about speed

Layers of width 4,096 (ffn 14,336, 32 heads, 8 groups) and the head of 128,256 words in bf16, our
trainer's own step with fp32 master weights. MFU is the step's operations (six per parameter and token
without the embedding's, attention over the whole square, recomputation not counted) over the device's
dense peak. The time budget is of one more step under torch's profiler, by kernel name.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from recording import machine, record, spread, table
from throughput_sides import Case, Ours, token_ids

AIM = 0.55
LLAMA_8B = {"hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "vocabulary": 128256}
TINY = {"hidden": 64, "ffn": 128, "heads": 4, "groups": 2, "vocabulary": 512}

PARTS = (
    ("attention", ("flash", "attention", "fmha", "sdpa", "baddbmm", "bmm")),
    ("communication", ("nccl", "gloo", "c10d", "allreduce")),
    ("GEMM", ("gemm", "mm", "cutlass", "cublas", "nvjet", "addmm", "xmma")),
    ("optimizer", ("adam", "multi_tensor")),
    ("softmax and loss", ("softmax", "gather", "scatter", "reduce")),
    ("copies and casts", ("copy", "memcpy", "memset", "fill", "cat")),
)
"""Part of the budget and what its kernels' names contain, first match; the rest is elementwise."""


def part_of(name: str) -> str:
    """The part of the budget that a kernel of this name belongs to."""
    small = name.lower()
    return next((part for part, words in PARTS if any(word in small for word in words)), "elementwise")


def budget(side: Ours, device: str) -> dict[str, float]:
    """Share of the device's busy time by part, over one step."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    elif device != "cpu":
        activities.append(ProfilerActivity.PrivateUse1)
    with profile(activities=activities) as found:
        side.step()
    spent: dict[str, float] = {}
    for event in found.key_averages():
        on_device = event.device_type != torch.autograd.DeviceType.CPU
        if on_device != (device != "cpu"):
            continue
        time_us = event.self_device_time_total if on_device else event.self_cpu_time_total
        part = part_of(event.key)
        spent[part] = spent.get(part, 0.0) + time_us
    total = sum(spent.values()) or 1.0
    return {part: time_us / total for part, time_us in sorted(spent.items(), key=lambda item: -item[1])}


def main() -> None:
    """Measure, print a table, and write it down where ``--record`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--layers", type=int, default=4, help="8 take 58 GB with their optimizer state")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="width 64 and 512 words, to try the script")
    parser.add_argument("--record", type=Path, help="directory for a dated JSON and Markdown file")
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.sequence, args.steps = 2, 128, 2

    import mt_megatron
    from mt_megatron.models.families import family_of

    warnings.filterwarnings("ignore")
    mt_megatron.patch(args.backend)
    backend = mt_megatron.backend()
    case = Case(
        name="Llama-8B's layers" if not args.tiny else "tiny",
        layers=args.layers,
        dtype=torch.bfloat16,
        sequence=args.sequence,
        micro_batch=args.micro_batch,
        micro_batches=args.micro_batches,
        **(TINY if args.tiny else LLAMA_8B),
    )
    recompute = {
        "none": (),
        "selective": ("--recompute-granularity", "selective"),
        "full": (
            *("--recompute-granularity", "full", "--recompute-method", "uniform"),
            *("--recompute-num-layers", "1"),
        ),
    }[args.recompute]
    more = ("--backend", args.backend, "--rotary-base", "500000", *recompute)
    side = Ours(case, token_ids(case), more)
    for _ in range(3):
        side.step()
    seconds = []
    for _ in range(args.steps):
        backend.synchronize()
        began = time.perf_counter()
        side.step()
        backend.synchronize()
        seconds.append(time.perf_counter() - began)
    flops = family_of(side.config).flops(side.config) * case.tokens
    peak = backend.peak_flops(torch.bfloat16)
    timed = spread(seconds)
    achieved = flops / timed["median"]
    shares = budget(side, backend.device_type)
    memory = backend.max_memory_allocated() or 0
    figures: dict[str, Any] = {
        "machine": {
            **machine(),
            "device": backend.device_name(backend.current_device()),
            "backend": backend.name,
        },
        "layers": args.layers,
        "sequence": args.sequence,
        "tokens_per_step": case.tokens,
        "micro_batches": args.micro_batches,
        "recompute": args.recompute,
        "vocabulary": case.vocabulary,
        "seconds": timed,
        "tokens_per_second": case.tokens / timed["median"],
        "tflops": achieved / 1e12,
        "peak_tflops": None if peak is None else peak / 1e12,
        "mfu": None if peak is None else achieved / peak,
        "memory_bytes": memory,
        "budget": shares,
    }
    mfu = "no peak is known" if peak is None else f"{100 * achieved / peak:.1f} %, aim {100 * AIM:.0f} %"
    rows = [
        ["device", f"{backend.device_name(backend.current_device())} ({backend.name})"],
        ["shape", f"{args.layers} layers of {case.hidden}, head of {case.vocabulary:,} words"],
        ["tokens", f"{case.micro_batches} x {case.micro_batch} x {case.sequence} a step"],
        ["recompute", args.recompute],
        ["step", f"{timed['median']:.4f} s ({timed['min']:.4f}-{timed['max']:.4f})"],
        ["tokens/s", f"{case.tokens / timed['median']:,.0f}"],
        ["TFLOP/s", f"{achieved / 1e12:.2f}"],
        ["MFU", mfu],
        ["peak memory", f"{memory / 1e9:.2f} GB"],
        *([f"time: {part}", f"{100 * share:.1f} %"] for part, share in shares.items()),
    ]
    tables = table(["", "found"], rows)
    print(tables)
    if args.record is not None:
        for path in record(args.record, "gpu-step", "One step on one device", figures, tables):
            print(path)
    side.close()


if __name__ == "__main__":
    main()
