"""One contender of ``cpu_throughput.py`` in a process of its own: a step for every line on stdin.

Says one JSON line when it is warm and one after every step; blocks, using no core, in between.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from throughput_sides import SHAPES, Case, Gemms, Ours, Stock, token_ids

SPREAD = {
    "tp2": ("--tensor-model-parallel-size", "2"),
    "tp2_sp": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "dp2": (),
}
"""Sides of two processes and what their trainer is told."""

EXPERTS = {"stock_grouped": "grouped_mm", "stock_eager": "eager"}
"""Sides with experts and the implementation of them that ``transformers`` is asked for."""


def build(side: str, case: Case) -> Any:
    """The contender ``side``."""
    tokens = token_ids(case)
    if side == "gemm":
        return Gemms(case)
    if side in ("stock", "stock_autocast", "compiled"):
        bf16 = "autocast" if side == "stock_autocast" else "masters"
        return Stock(case, tokens, compiled=side == "compiled", bf16=bf16)
    if side in EXPERTS:
        return Stock(case, tokens, compiled=False, experts=EXPERTS[side])
    import mt_megatron

    warnings.filterwarnings("ignore")
    mt_megatron.patch("cpu")
    more = SPREAD.get(side, ("--no-moe-grouped-gemm",) if side == "ours_sequential" else ())
    return Ours(case, tokens, more, data_parallel=2 if side == "dp2" else 1)


def main() -> None:
    """Read ``go`` lines until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print torch's profile of one step and stop")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    case = Case(
        dtype=getattr(torch, args.dtype),
        micro_batch=8 // args.micro_batches,
        micro_batches=args.micro_batches,
        **SHAPES[args.shape],
    )
    side = build(args.side, case)
    for _ in range(args.warm_up):
        loss = side.step()
    said = {"threads": torch.get_num_threads(), "loss": loss, "pid": os.getpid()}
    if args.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as found:
            side.step()
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=40))
        return
    print(json.dumps(said), flush=True)
    for _ in sys.stdin:
        if dist.is_initialized():
            dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        loss = side.step()
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "cpu": time.process_time() - used, "loss": loss}), flush=True)
    if isinstance(side, Ours):
        side.close()


if __name__ == "__main__":
    main()
