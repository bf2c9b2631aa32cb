"""Casts of all experts' rows at once beside casts expert by expert, with the products of both, interleaved.

    python benchmarks/fp8/grouped_experts.py [--experts 8 64] [--rows 6144] [--rounds 9] [--record results/]
    python benchmarks/fp8/grouped_experts.py --toy      # see that it runs

One layer's forward product and both of backward, on the CPU by the reference. "again" is the loop once more:
the ratio of nothing. Every round has other numbers of rows. Ratios are of the same round; the order of the
sides turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from recording import machine, record, table
from torch import Tensor

from mt_megatron.fp8.grouped import GroupedQuantised, quantise_groups
from mt_megatron.fp8.products import reference
from mt_megatron.fp8.quantise import quantise
from mt_megatron.fp8.recipe import CONTRACTED, OPERANDS, PRESETS, ROLES, Recipe
from mt_megatron.seams.grouped_gemm import TokenGroups, groups_from

INPUTS, OUTPUTS = 512, 256
Sources = dict[str, tuple[Tensor, TokenGroups]]


def one_by_one(recipe: Recipe, sources: Sources) -> None:
    """Every expert's operands cast by themselves."""
    for role in ROLES:
        product = recipe.product(role)
        pairs = list(zip(OPERANDS[role], (product.a, product.b), CONTRACTED[role], strict=True))
        for expert, (start, end) in enumerate(sources["input"][1].bounds()):
            if end == start or not product.quantised:
                continue
            operands = []
            for kind, cast, along in pairs:
                source, groups = sources[kind]
                first, last = groups.bounds()[expert]
                generator = torch.Generator().manual_seed(expert) if cast.stochastic else None
                operands.append(quantise(source[first:last], cast, along, generator=generator))
            reference(role, *operands, product, torch.bfloat16)


def at_once(recipe: Recipe, sources: Sources) -> None:
    """All experts' operands cast together."""
    for role in ROLES:
        product = recipe.product(role)
        if not product.quantised:
            continue
        operands: list[GroupedQuantised] = [
            quantise_groups(*sources[kind], cast, along, generators=torch.Generator().manual_seed)
            for kind, cast, along in zip(
                OPERANDS[role], (product.a, product.b), CONTRACTED[role], strict=True
            )
        ]
        for expert, (start, end) in enumerate(sources["input"][1].bounds()):
            if end > start:
                reference(role, *(each.of(expert) for each in operands), product, torch.bfloat16)


SIDES: dict[str, Callable[[Recipe, Sources], None]] = {
    "one by one": one_by_one,
    "at once": at_once,
    "again": one_by_one,
}


def drawn(experts: int, rows: int, seed: int) -> Sources:
    """Operands of a layer whose experts have numbers of rows as a router gives them."""
    generator = torch.Generator().manual_seed(seed)
    likely = torch.softmax(0.5 * torch.randn(experts, generator=generator), 0)
    chosen = torch.multinomial(likely, rows, replacement=True, generator=generator)
    groups = groups_from(chosen.bincount(minlength=experts), rows, torch.device("cpu"))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    whole = groups_from([OUTPUTS] * experts, experts * OUTPUTS, torch.device("cpu"))
    return {
        "input": (tensor(rows, INPUTS), groups),
        "grad": (tensor(rows, OUTPUTS), groups),
        "weight": (tensor(experts * OUTPUTS, INPUTS), whole),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--rows", type=int, default=6144)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    if args.toy:
        args.experts, args.rows, args.rounds = [4], 128, 2
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    found: list[dict[str, Any]] = []
    for experts in args.experts:
        for name, recipe in PRESETS.items():
            times: dict[str, list[float]] = {side: [] for side in SIDES}
            for round_ in range(args.rounds + 1):
                sources, order = drawn(experts, args.rows, round_), list(SIDES)
                for side in order[round_ % 3 :] + order[: round_ % 3]:
                    began = time.perf_counter()
                    SIDES[side](recipe, sources)
                    if round_:
                        times[side].append(time.perf_counter() - began)
            row: dict[str, Any] = {"experts": experts, "recipe": name}
            for side in ("at once", "again"):
                ratios = sorted(a / b for a, b in zip(times[side], times["one by one"], strict=True))
                row[side] = [round(each, 3) for each in (ratios[0], statistics.median(ratios), ratios[-1])]
            found.append(row)
            print(row, flush=True)
    if args.record:
        cells = [
            [str(row["experts"]), row["recipe"]]
            + ["{1} ({0} to {2})".format(*row[side]) for side in ("at once", "again")]
            for row in found
        ]
        title = (
            "FP8 experts: one cast for all beside a cast for each, the loop's time being 1, median (range)"
        )
        figures = {"machine": machine(), "rows": args.rows, "rounds": args.rounds, "results": found}
        shown = table(["experts", "recipe", "at once", "again"], cells)
        record(args.record, "fp8-grouped-experts", title, figures, shown)


if __name__ == "__main__":
    main()
