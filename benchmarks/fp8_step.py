"""Seconds of a training step under each FP8 recipe beside the same step in bf16, interleaved.

    python benchmarks/fp8_step.py [--backend cpu] [--hidden 1024 --layers 6 --tokens 2048]
        [--recipes tensorwise rowwise ...] [--rounds 5] [--record results/]
    python benchmarks/fp8_step.py --toy        # a tiny model, to see that it runs

One process with one model per side, one step of each side a round; ratios are of the same round. On the CPU
the recipes are emulated: the figure is the cost of the emulation, and says nothing about a device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import mt_megatron
from mt_megatron.config.parse import load_config
from mt_megatron.fp8.recipe import possible_recipes
from mt_megatron.models.families import family_of
from mt_megatron.training.distributed import joined
from mt_megatron.training.model import build
from mt_megatron.training.step import Shape, make_forward_step, train_step
from mt_megatron.training.validate import validate


def flags_of(args: argparse.Namespace, recipe: str | None) -> list[str]:
    """The options of one side's run."""
    hidden, heads = args.hidden, max(1, args.hidden // 64)
    words = (
        f"--num-layers {args.layers} --hidden-size {hidden} --ffn-hidden-size {args.ffn or 4 * hidden} "
        f"--num-attention-heads {heads} --num-query-groups {heads} --vocab-size {args.vocabulary} "
        f"--seq-length {args.sequence} --micro-batch-size {args.tokens // args.sequence} "
        f"--global-batch-size {args.tokens // args.sequence} --train-iters 1000 --lr 1e-4 --swiglu "
        "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --bf16 --mock-data "
        "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --hidden-dropout 0 "
        f"--attention-dropout 0 --backend {args.backend} --no-check-memory "
        f"--cpu-bf16-products {args.cpu_bf16_products}"
    ).split()
    if recipe is not None:
        words += ["--fp8-recipe", recipe, *args.extra]
    return words


class Side:
    """One model and its batches."""

    def __init__(self, args: argparse.Namespace, recipe: str | None, job: Any) -> None:
        config = load_config(flags_of(args, recipe))
        validate(config, world_size=1)
        family = family_of(config)
        self.trainable = build(config, job, family)
        self.job = job
        self.step_function = make_forward_step(family, job.backend.device(job.backend.current_device()))
        self.shape = Shape(
            num_microbatches=1, micro_batch_size=args.tokens // args.sequence, seq_length=args.sequence
        )
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(
            0, args.vocabulary, (self.shape.micro_batch_size, args.sequence + 1), generator=generator
        )
        self.batch = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(self.shape.micro_batch_size, args.sequence),
            "position_ids": torch.arange(args.sequence).expand(self.shape.micro_batch_size, -1).contiguous(),
        }
        self.iteration = 0

    def step(self) -> float:
        """Seconds of one step."""
        self.iteration += 1
        self.job.backend.synchronize()
        began = time.perf_counter()
        train_step(
            self.trainable,
            self.step_function,
            [iter([self.batch])],
            self.shape,
            self.job,
            iteration=self.iteration,
        )
        self.job.backend.synchronize()
        return time.perf_counter() - began


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
    parser.add_argument("--recipes", nargs="*")
    parser.add_argument("--extra", nargs="*", default=["--no-first-last-layers-bf16"])
    parser.add_argument("--cpu-bf16-products", default="torch", help="of all sides: torch or fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    if args.toy:
        args.hidden, args.layers, args.tokens, args.sequence, args.rounds = 64, 3, 64, 32, 2
        args.vocabulary = 4096
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    mt_megatron.patch(backend=args.backend)
    backend = mt_megatron.backend()
    recipes = args.recipes or list(possible_recipes(backend.name, backend.fp8_granularities()))
    first = load_config(flags_of(args, None))
    with joined(first, backend) as job:
        sides = {name: Side(args, None if name == "bf16" else name, job) for name in ("bf16", *recipes)}
        for side in sides.values():
            side.step()
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, side in sides.items():
                times[name].append(side.step())
    rows = []
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["bf16"], strict=True)]
        rows.append(
            {
                "recipe": name,
                "seconds": round(statistics.median(seconds), 4),
                "of bf16": round(statistics.median(ratios), 3),
                "ratios": [round(each, 3) for each in ratios],
            }
        )
        print(f"{name:<16}{rows[-1]['seconds']:>9.4f} s  {rows[-1]['of bf16']:>7.3f} of bf16", flush=True)
    if args.record:
        from recording import machine, record, table

        what = {"hidden": args.hidden, "layers": args.layers, "tokens": args.tokens, "backend": backend.name}
        what["cpu_bf16_products"] = args.cpu_bf16_products
        what["threads"] = torch.get_num_threads()
        emulated = backend.name == "cpu"
        where = (
            machine() if emulated else {**machine(), "device": backend.device_name(backend.current_device())}
        )
        record(
            args.record,
            "fp8-step" if emulated else f"fp8-step-{backend.name}",
            f"FP8 step beside bf16{', emulated' if emulated else ''}",
            {"machine": where, "emulated": emulated, **what, "rows": rows},
            table(
                ["recipe", "seconds", "of bf16"],
                [[row["recipe"], str(row["seconds"]), str(row["of bf16"])] for row in rows],
            ),
        )


if __name__ == "__main__":
    main()
