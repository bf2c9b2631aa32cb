"""``mt-megatron pipeline draw``: one schedule as a picture, as text, or as CSV to edit."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.pipeline.csv_form import to_csv
from mt_megatron.pipeline.draw import svg, text

from .setting import add_options
from .simulate import timed


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    about = "one schedule as text, SVG or CSV"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "draw",
        help=about,
        description="Draw a simulated step: ranks over time. Prints text, or writes FILE: .svg is a\n"
        "picture, .csv the schedule, one row per rank, which --pipeline-schedule FILE.csv runs; .txt text.",
        epilog="examples:\n  mt-megatron pipeline draw zb_h1 --ranks 4 --microbatches 8\n"
        "  mt-megatron pipeline draw --from runs/llama3 --output step.svg\n"
        "  mt-megatron pipeline draw memory_capped:6 --slow-link 1-2:latency_ms=2000 --output mine.csv\n\n"
        "exit codes: 0 fine, 1 a problem was found, 2 wrong use or no such trace",
    )
    parser.usage = (
        "mt-megatron pipeline draw [--schedule SCHEDULE] [--output FILE] [options] [options of pretrain]"
    )
    parser.add_argument("--schedule", metavar="SCHEDULE", help="the first word is it too (1f1b)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="an .svg, .csv or .txt file")
    parser.add_argument("--blocking", action="store_true", help="as pipeline simulate --blocking")
    parser.add_argument("--width", type=int, metavar="N", help="characters or pixels (the terminal's, 1200)")
    add_options(parser)
    parser.set_defaults(func=run, config_arguments=True, leading_word="--schedule")
    return parser


def run(args: argparse.Namespace) -> int:
    """Draw; returns the exit code."""
    kind = ".txt" if args.output is None else args.output.suffix
    if kind not in (".svg", ".csv", ".txt"):
        raise ConfigError(f"--output is {args.output}; expected a file that ends with .svg, .csv or .txt")
    if args.width is not None and args.width < 40:
        raise ConfigError(f"--width is {args.width}; expected at least 40")
    _, timeline = timed(args)
    if kind == ".csv":
        made = to_csv(timeline.program.schedule)
    elif kind == ".svg":
        made = svg(timeline, args.width or 1200)
    else:
        made = text(timeline, args.width or shutil.get_terminal_size((120, 24)).columns) + "\n"
    if args.output is None:
        print(made, end="")
        return 0
    try:
        args.output.write_text(made, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output is {args.output}: {error.strerror}; expected a place to write") from None
    print(f"{args.output}: {timeline.program.schedule.name}, simulated")
    return 0
