"""``mt-megatron pipeline compare``: every schedule under the same costs, side by side."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from mt_megatron.pipeline.compare import Row, compare, row
from mt_megatron.pipeline.draw import seconds

from .setting import add_options, require_used, setting_of

_COLUMNS = (
    "schedule",
    "chunks",
    "step",
    "against",
    "bubble",
    "activations",
    "memory",
    "needs",
    "delay",
    "send",
    "reduction",
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    text = "all schedules side by side"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compare",
        help=text,
        description="Simulate every schedule under the same costs. The first row is Megatron-Core's 1F1B,\n"
        "whose ranks wait for their exchanges; all others send and receive beside their work. The last rows\n"
        "are a pipeline that has lost a rank: its replicas take over its micro-batches, or the whole of it\n"
        "is dropped (perfect links, against the step before the loss).",
        epilog="columns: against: step over the first row's; activations: of the rank that keeps most, in\n"
        "micro-batches of a whole rank; needs: bandwidth of all links with which the step is 1 % longer\n"
        "than with unlimited ones; delay: of every message, likewise; send, reduction: what a message may\n"
        "take before it is waited for, and a gradient reduction before the step grows, on average\n\n"
        "examples:\n  mt-megatron pipeline compare --cluster 64x200g\n"
        "  mt-megatron pipeline compare --from runs/llama3 --add mine.csv\n"
        "  mt-megatron pipeline compare --ranks 8 --microbatches 32 --slow-link 3-4:latency_ms=1000\n\n"
        "exit codes: 0 fine, 1 a problem was found, 2 wrong use or no such trace",
    )
    parser.add_argument(
        "--add", action="append", default=[], metavar="SCHEDULE", help="NAME:NUMBER or FILE.csv; repeatable"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=4,
        metavar="N",
        help="pipelines, for the loss of a rank (4; 0: no such rows)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser)
    parser.set_defaults(func=run, config_arguments=True)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit code."""
    setting = setting_of(args)
    ranks = setting.placement.ranks
    # Of several chunks the last rank's sends to the first.
    edges = {(rank, (rank + 1) % ranks) for rank in range(ranks)} - {(0, 0)}
    require_used(args.slow_link, edges, "any of the schedules")
    added = [setting.schedule(text) for text in args.add]
    rows = compare(
        setting.samples,
        setting.placement,
        setting.microbatches,
        schedules=added,
        replicas=args.replicas,
    )
    measured = setting.measured
    if measured is not None and args.chunks is None and args.microbatches is None:
        own = row(measured.program(), setting.samples, name=f"the run's own, {measured.calls}")
        rows.insert(0, replace(own, against=own.seconds / rows[0].seconds))
    if args.json:
        print(
            json.dumps(
                {"simulated": True, "about": setting.about, "rows": [r.as_dict() for r in rows]}, indent=2
            )
        )
        return 0
    print(
        "\n".join(
            [*setting.about, f"{setting.microbatches} micro-batches; every figure below is simulated", ""]
        )
    )
    print(table(rows))
    return 0


def table(rows: list[Row]) -> str:
    """``rows`` as aligned text; columns that say nothing of any row are left out."""
    cells = [_cells(each) for each in rows]
    shown = [column for column in _COLUMNS if any(row[column] for row in cells)]
    widths = {column: max(len(column), *(len(row[column]) for row in cells)) for column in shown}
    lines = [{column: column for column in shown}, *cells]
    return "\n".join(
        "  ".join(
            f"{line[column]:<{widths[column]}}"
            if column == "schedule"
            else f"{line[column]:>{widths[column]}}"
            for column in shown
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> dict[str, str]:
    cells = dict.fromkeys(_COLUMNS, "") | {
        "schedule": row.name,
        "step": seconds(row.seconds),
        "against": f"{row.against:.3f}",
    }
    if row.demands is None:
        return cells
    needs = row.demands
    return cells | {
        "chunks": str(row.chunks),
        "bubble": f"{row.bubble:.1%}",
        "activations": f"{row.activations:.4g}",
        "memory": f"{row.bytes / 2**30:.1f} GiB" if row.bytes else "",
        "needs": f"{needs.bandwidth * 8 / 1e9:.3g} Gb/s" if needs.bandwidth else "",
        "delay": seconds(needs.latency),
        "send": seconds(needs.send_window),
        "reduction": seconds(needs.reduction_window),
    }
