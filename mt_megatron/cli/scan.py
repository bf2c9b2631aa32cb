"""``mt-megatron scan``: traces of runs. Each action is a module ``mt_megatron.cli.scan_<word>``.

Such a module has ``add_parser(subparsers) -> argparse.ArgumentParser``, which sets ``func(args) -> int``, as
the subcommands themselves do.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

WORDS = (
    "report",
    "status",
    "trace",
    "sql",
    "level",
    "window",
    "confirm",
    "inject",
    "selftest",
    "simulate",
)
"""Actions, in the order of ``--help``."""

_CODES = "exit codes: 0 fine, 1 a problem was found, 2 wrong use"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand and its actions."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "scan",
        help="traces of runs: what every rank did, on one clock, and who held the others up",
        description="Look at the trace of a run, or change what a run records while it trains. RUN is the "
        "folder of a run's outputs, or its 'scan' folder.",
        epilog=f"example:\n  mt-megatron scan level RUN full\n\n{_CODES}",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for word in WORDS:
        import_module(f"mt_megatron.cli.scan_{word}").add_parser(actions)
    return parser
