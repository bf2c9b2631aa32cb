"""MegatronApp's published figures for its schedules, simulated: what holds and what does not.

python benchmarks/pipeline/published_claims.py --record

It says of breadth-first (BFC) and depth-first (DFC) against 1F1B: half the peak link bandwidth, and 2.6 and
2.4 times the time that a send and a gradient reduction may take without stalling the pipeline. Here each
schedule of 8 ranks runs with even stages, W = F = B / 2 and, besides, with a last stage that takes 1.3
times as long (an output layer). Bandwidth is the least with which a step is at most 1 % longer. Times for a
send and a reduction are means: from when the message or the gradients are there until the receiving rank
waits, or the step grows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recording import machine, record, table  # noqa: E402

from mt_megatron.pipeline.actions import Placement  # noqa: E402
from mt_megatron.pipeline.generate.catalogue import generate  # noqa: E402
from mt_megatron.pipeline.policy.candidates import adapted  # noqa: E402
from mt_megatron.pipeline.simulate.costs import Costs  # noqa: E402
from mt_megatron.pipeline.simulate.demands import demands  # noqa: E402
from mt_megatron.pipeline.simulate.memory import activation_peaks  # noqa: E402
from mt_megatron.pipeline.simulate.program import Program  # noqa: E402

RANKS = 8
CLAIMED = {"bandwidth": 0.5, "send": 2.6, "reduction": 2.4}
SCHEDULES = (
    ("1f1b", 1),
    ("interleaved", 2),
    ("depth_first", 2),
    ("breadth_first", 2),
    ("depth_first", 4),
    ("breadth_first", 4),
    ("adapted", 1),
    ("adapted", 2),
)
"""Name and chunks; the first is what the others are compared with. ``adapted``: within 1F1B's activations
and 2 more."""

HEADER = (
    "stages",
    "micro-batches",
    "schedule",
    "chunks",
    "step",
    "activations",
    "bandwidth needed",
    "a send may take",
    "a reduction may take",
)


def costs_of(chunks: int, uneven: bool) -> Costs:
    """Even stages, in which a rank's forward takes 1; or a last stage whose forward takes 0.3 longer."""
    stages = RANKS * chunks
    share = [1 / chunks] * stages
    if uneven:
        share[-1] += 0.3
    return Costs(
        forward=share, backward=[2 * each for each in share], weight=share, message=1.0, reduction=0.0
    )


WANTED = {
    "bandwidth": ("peak link bandwidth", "a half or less", lambda ratio: ratio <= CLAIMED["bandwidth"]),
    "send": ("time for a send", "2.6 times or more", lambda ratio: ratio >= CLAIMED["send"]),
    "reduction": ("time for a reduction", "2.4 times or more", lambda ratio: ratio >= CLAIMED["reduction"]),
}
"""By figure its name, what is claimed, and whether a ratio to 1F1B is at least as good."""


def verdicts(figures: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each claim and kind of schedule: where it holds."""
    lines = []
    for key, (name, claim, holds) in WANTED.items():
        for schedule in ("breadth_first", "depth_first"):
            rows = [each for each in figures if each["schedule"] == schedule]
            kept = [each for each in rows if holds(each[key])]
            where = ", ".join(
                f"{'uneven' if each['uneven'] else 'even'} stages, {each['chunks']} chunks, "
                f"{each['microbatches']} micro-batches (x {each[key]:.2f})"
                for each in kept
            )
            found = f"x {min(each[key] for each in rows):.2f} to x {max(each[key] for each in rows):.2f}"
            lines.append(
                f"- {name}, {claim}, {schedule}: holds in {len(kept)} of {len(rows)} cases ({found})"
                + (f": {where}" if 0 < len(kept) < len(rows) else "")
            )
    most = max(each["activations"] for each in figures if each["schedule"] == "breadth_first")
    lines.append(
        f"- breadth_first keeps the activations of all micro-batches (up to {most:g}, where 1f1b keeps "
        f"{RANKS}); depth_first keeps those of 1f1b"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    rows, figures = [], []
    for uneven in (False, True):
        for microbatches in (16, 32):
            base = None
            for name, chunks in SCHEDULES:
                costs, placement = costs_of(chunks, uneven), Placement(RANKS, chunks)
                if name == "adapted":
                    cap = (float((RANKS + 2) * chunks),) * RANKS
                    made = adapted(placement, microbatches, costs, cap, split=True)
                    assert made is not None
                    program = made.program
                else:
                    program = Program(generate(name, ranks=RANKS, chunks=chunks, microbatches=microbatches))
                found = demands(program, costs)
                values = found.bandwidth, found.send_window, found.reduction_window
                base = base or values
                ratios = [value / first for value, first in zip(values, base, strict=True)]
                seconds = program.makespan(costs)
                kept = max(activation_peaks(program.schedule)) / chunks
                figures.append(
                    {"uneven": uneven, "microbatches": microbatches, "schedule": name, "chunks": chunks}
                    | {"step": seconds, "activations": kept}
                    | dict(zip(CLAIMED, ratios, strict=True))
                )
                rows.append(
                    ["uneven" if uneven else "even", str(microbatches), name, str(chunks)]
                    + [f"{seconds:.1f} F", f"{kept:g}"]
                    + [f"x {ratio:.2f}" for ratio in ratios]
                )
    text = "\n".join(
        [
            "Claimed against 1F1B: half the peak link bandwidth; 2.6 times the time for a send and 2.4 times "
            "that for a gradient reduction before the pipeline stalls. Everything here is simulated.",
            "",
            *verdicts(figures),
            "",
            table(HEADER, rows),
        ]
    )
    print(text)
    if options.record:
        folder = Path(__file__).resolve().parents[2] / "results"
        data = {"machine": machine(), "claimed": CLAIMED, "ranks": RANKS, "rows": figures}
        for path in record(folder, "pipeline-claims-simulated", "Published claims, simulated", data, text):
            print(path)


if __name__ == "__main__":
    main()
