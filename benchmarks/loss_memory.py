"""Cost of the loss at Llama 3's vocabulary: memory, time and gradients beside the plain path.

    python benchmarks/loss_memory.py [--vocabulary 128256] [--dtypes float32 bfloat16] [--record results/]

The output layer and the cross-entropy of one micro-batch of 2 x 2,048 tokens of width 1,024. Memory is
the largest sum of torch's allocations during forward and backward, by its own allocator's events,
beyond what was there before: hidden states, weight and gradient buffer. The plain path is Megatron-Core's
product for all tokens and its vocabulary-parallel cross-entropy on fp32 logits.
"""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path
from typing import Any

import torch
from recording import machine, record, spread, table

SEQUENCE, BATCH, HIDDEN = 2048, 2, 1024
AIM = 0.05


class Head:
    """Operands of one micro-batch and both ways to its loss."""

    def __init__(self, vocabulary: int, dtype: torch.dtype, sequence: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(sequence, BATCH, HIDDEN, generator=generator).to(dtype).requires_grad_()
        weight = torch.randn(vocabulary, HIDDEN, generator=generator).mul_(HIDDEN**-0.5)
        self.weight: Any = torch.nn.Parameter(weight.to(dtype))
        self.weight.main_grad = torch.zeros(vocabulary, HIDDEN)
        self.weight.grad_added_to_main_grad = False
        self.labels = torch.randint(vocabulary, (sequence, BATCH), generator=generator)
        self.gradient = torch.full((sequence, BATCH), 1.0 / (sequence * BATCH))
        self.logits_bytes = 4 * sequence * BATCH * vocabulary

    def plain(self) -> torch.Tensor:
        """Logits of every token, then upstream's loss."""
        from megatron.core import tensor_parallel

        from mt_megatron.layers.linear import TensorParallelLinear

        apply: Any = TensorParallelLinear.apply
        logits = apply(self.hidden, self.weight, None, True, False, False, None, 0)
        losses: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits.float(), self.labels)
        return losses

    def blocked(self) -> torch.Tensor:
        """A block of tokens at a time."""
        from mt_megatron.layers.loss.cross_entropy import linear_cross_entropy

        return linear_cross_entropy(self.hidden, self.weight, self.labels, announced=self.gradient)

    def run(self, way: str) -> torch.Tensor:
        """Forward and backward; the losses."""
        self.hidden.grad = None
        self.weight.grad = None
        losses: torch.Tensor = getattr(self, way)()
        losses.backward(self.gradient)
        # Stands for no tensor: DDP drops it at once.
        self.weight.grad = None
        return losses.detach()


def peak_bytes(head: Head, way: str) -> int:
    """Largest sum of allocations less frees within one ``run``, by the allocator's events."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        head.run(way)
    now = peak = 0
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def compare(vocabulary: int, dtype: torch.dtype, sequence: int, rounds: int, clock: str) -> dict[str, Any]:
    """Gradients, peaks and times of both ways, the times alternating."""
    now = time.perf_counter if clock == "seconds" else time.process_time
    head = Head(vocabulary, dtype, sequence)
    results: dict[str, list[torch.Tensor]] = {}
    for way in ("plain", "blocked"):
        head.weight.main_grad.zero_()
        losses = head.run(way)
        assert head.hidden.grad is not None
        results[way] = [losses, head.hidden.grad.float(), head.weight.main_grad.clone()]
    errors = [
        float((a - b).norm() / b.norm()) for a, b in zip(results["blocked"], results["plain"], strict=True)
    ]
    del results
    peaks = {way: peak_bytes(head, way) for way in ("plain", "blocked")}
    seconds: dict[str, list[float]] = {"plain": [], "blocked": []}
    for number in range(rounds):
        for way in list(seconds) if number % 2 == 0 else reversed(list(seconds)):
            began = now()
            head.run(way)
            seconds[way].append(now() - began)
    return {
        "dtype": str(dtype)[6:],
        "logits_bytes": head.logits_bytes,
        "peak_bytes": peaks,
        "share_of_logits": {way: peak / head.logits_bytes for way, peak in peaks.items()},
        "errors": dict(zip(("losses", "hidden", "weight"), errors, strict=True)),
        "seconds": seconds,
        "plain_over_blocked": spread(
            [a / b for a, b in zip(seconds["plain"], seconds["blocked"], strict=True)]
        ),
    }


def main() -> None:
    """Measure, print a table, and write it down where ``--record`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--clock",
        choices=("seconds", "processor"),
        default="seconds",
        help="what the ratio is of; processor time, with one thread, changes less on a shared machine",
    )
    parser.add_argument("--record", type=Path, help="directory for a dated JSON and Markdown file")
    args = parser.parse_args()
    about = machine()

    import mt_megatron
    from mt_megatron.backends.host_process import keep_freed_memory
    from mt_megatron.parallel import rank_layout as layout
    from mt_megatron.training.distributed import _init_alone

    torch.set_num_threads(args.threads)
    mt_megatron.patch("cpu")
    keep_freed_memory()
    _init_alone(mt_megatron.backend(), datetime.timedelta(minutes=5))
    layout.initialize(layout.RankLayout(world_size=1), mt_megatron.backend())
    cases, rows = [], []
    for name in args.dtypes:
        case = compare(args.vocabulary, getattr(torch, name), args.sequence, args.rounds, args.clock)
        cases.append(case)
        peaks, share, errors = case["peak_bytes"], case["share_of_logits"], case["errors"]
        faster = case["plain_over_blocked"]
        rows.append(
            [
                name,
                f"{case['logits_bytes'] / 1e6:,.0f}",
                f"{peaks['plain'] / 1e6:,.0f}",
                f"{peaks['blocked'] / 1e6:,.0f}",
                f"{100 * share['blocked']:.2f} %, at most {100 * AIM:.0f} %",
                f"{errors['losses']:.1e}, {errors['hidden']:.1e}, {errors['weight']:.1e}",
                f"{faster['median']:.2f} ({faster['min']:.2f}-{faster['max']:.2f})",
            ]
        )
    header = ["dtype", "fp32 logits MB", "plain MB", "blocked MB", "blocked / logits"]
    tables = table(
        [*header, "difference of losses, d hidden, d weight", "plain seconds / blocked seconds"], rows
    )
    print(tables)
    if args.record is not None:
        title = f"The loss at a vocabulary of {args.vocabulary:,}, {args.sequence * BATCH:,} tokens"
        title += f"; {args.threads} thread(s), {args.rounds} rounds, {args.clock}"
        figures = {"machine": about, "vocabulary": args.vocabulary, "clock": args.clock, "cases": cases}
        for path in record(args.record, "loss-memory", title, figures, tables):
            print(path)
    layout.destroy()


if __name__ == "__main__":
    main()
