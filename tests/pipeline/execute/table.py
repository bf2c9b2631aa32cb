"""Every combination of the executor's acceptance; ``python -m tests.pipeline.execute.table`` lists them.

Each row is one model under one layout: upstream's schedule of that placement computes a step, then each
schedule named computes the same step; losses, statistics and gradients are compared to the bit.
"""

from __future__ import annotations

import itertools
from typing import Any

from tests.pipeline.execute.small_models import MODELS

SCHEDULES = {
    1: ["1f1b", "breadth_first", "depth_first", "memory_capped:{cap}", "zb_h1"],
    2: ["interleaved", "breadth_first", "depth_first", "hybrid:{group}", "memory_capped:{cap}", "zb_h1"],
    3: ["interleaved", "breadth_first", "depth_first", "zb_h1"],
}
"""By chunks per rank."""

ZERO = {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "bucket_size": 4000}
WIDE = 128
"""Hidden size where the optimizer is distributed: where parameters do not all begin at multiples of 128,
upstream lays a tied embedding's first 64 gradients into the bucket before its own, and loses what comes
late."""

REDUCTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap_grad_reduce": True, "bucket_size": 4000},
    "zero1": ZERO,
    "fp32 sums": {**ZERO, "grad_reduce_in_fp32": True},
    "aligned": {"overlap_grad_reduce": True, "aligned": True},
}


def case(
    pp: int, chunks: int, model: str, *, bf16: bool = False, reduction: str = "plain", microbatches: int = 0
) -> dict[str, Any]:
    """One row, as ``ranks.same_as_upstream`` takes it."""
    count = microbatches or 2 * pp
    cap = pp + 1 + (chunks - 1) * pp
    return {
        "model": model,
        "chunks": chunks,
        "microbatches": count,
        "schedules": [name.format(cap=cap, group=min(3, count)) for name in SCHEDULES[chunks]],
        **({"bf16": True} if bf16 else {}),
        **({"ddp": REDUCTIONS[reduction]} if reduction != "plain" else {}),
        **({"hidden_size": WIDE} if "use_distributed_optimizer" in REDUCTIONS[reduction] else {}),
    }


def combinations(pp: int, dp: int) -> list[dict[str, Any]]:
    """All rows of ``pp`` pipeline ranks and ``dp`` copies of the pipeline."""
    reductions = ["plain", "overlap"] if dp == 1 else ["zero1", "fp32 sums"]
    rows = [
        case(pp, chunks, model, bf16=bf16, reduction=reduction)
        for chunks, model, bf16, reduction in itertools.product((1, 2), MODELS, (False, True), reductions)
        # Sums in fp32 are another matter under bf16 alone.
        if bf16 or reduction != "fp32 sums"
    ]
    if dp > 1:
        rows += [
            case(pp, chunks, model, reduction="aligned") for chunks in (1, 2) for model in ("tied", "moe")
        ]
    if dp == 1:
        rows += [case(pp, 3, model) for model in ("dense", "moe", "mtp")]
        # As many micro-batches as ranks, where upstream runs all forwards first, and numbers that do not fit.
        rows += [case(pp, chunks, "tied", microbatches=pp) for chunks in (1, 2)]
        rows += [case(pp, 1, "moe", microbatches=count) for count in sorted({1, pp - 1, 2 * pp + 1})]
    return rows


LAYOUTS = ((2, 1), (4, 1), (2, 2))
"""Pipeline ranks and copies of the pipeline."""

if __name__ == "__main__":
    total = 0
    for pp, dp in LAYOUTS:
        for row in combinations(pp, dp):
            total += len(row["schedules"])
            options = ", ".join(
                f"{key}={value}" for key, value in row.items() if key not in ("model", "schedules")
            )
            print(f"P={pp} D={dp} {row['model']}: {options}: {', '.join(row['schedules'])}")
    print(f"{total} comparisons")
