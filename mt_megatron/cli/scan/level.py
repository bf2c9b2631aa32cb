"""``mt-megatron scan level``: how much a run records from its next step on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_EXAMPLE = """example:
  mt-megatron scan level RUN full

exit codes: 0 fine, 1 a problem was found, 2 wrong use or no such trace"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    from mt_megatron.scan.record.levels import LEVELS

    text = "set what a training run records, from its next step on"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "level",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. 'base' holds steps, micro-batches and\n"
        "communication, 'full' also layers and their submodules, 'kernel' also every kernel,\n"
        "'off' nothing.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument("level", metavar="LEVEL", choices=LEVELS, help=", ".join(LEVELS))
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write it into the control file; returns the exit code."""
    from mt_megatron.cli.scan.window import say_who_hears
    from mt_megatron.scan.format.run_files import existing_run
    from mt_megatron.scan.record.control import change_control

    files = existing_run(args.run)
    change_control(files, {"level": args.level})
    print(f"level {args.level} is asked for in {files.control}")
    say_who_hears(files)
    return 0
