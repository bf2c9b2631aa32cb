"""``mt-megatron scan window``: have a run record a few steps in every so many at a higher level."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mt_megatron.scan.format.run_files import RunFiles

_EXAMPLE = (
    "examples:\n  mt-megatron scan window RUN 100:2:full\n  mt-megatron scan window RUN none\n\n"
    "exit codes: 0 fine, 1 a problem was found, 2 wrong use or no such trace"
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    text = "have a training run record a few steps in every so many at a higher level"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "window", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EXAMPLE
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument(
        "window",
        metavar="EVERY:STEPS:LEVEL",
        help="100:2:full records 2 steps in every 100 at level full; 'none' ends it",
    )
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write it into the control file; returns the exit code."""
    from mt_megatron.scan.format.run_files import existing_run
    from mt_megatron.scan.record.control import change_control
    from mt_megatron.scan.record.levels import Window

    window = None if args.window == "none" else Window.parse(args.window)
    files = existing_run(args.run)
    change_control(files, {"window": False if window is None else window.to_dict()})
    print(f"{'no window' if window is None else f'window {args.window}'} is asked for in {files.control}")
    say_who_hears(files)
    return 0


def say_who_hears(files: RunFiles) -> None:
    """Whether ranks are there to take it up."""
    from mt_megatron.scan.format.recording_end import may_record

    ranks = files.ranks()
    ended = [rank for rank in ranks if not may_record(files.rank_folder(rank))]
    if len(ended) == len(ranks):
        print("no rank records there: the run has ended or was killed, and a later start does not take it up")
    elif ended:
        print(f"the ranks take it up at their next step; {len(ended)} of {len(ranks)} ended: {ended[:8]}")
    else:
        print(f"{len(ranks)} rank(s) take it up at their next step")
