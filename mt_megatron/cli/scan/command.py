"""``mt-megatron scan``: traces of runs. Each action is a module ``mt_megatron.cli.scan.<word>``.

Such a module has ``add_parser(subparsers) -> argparse.ArgumentParser``, which sets ``func(args) -> int``, as
the subcommands themselves do.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from mt_megatron.errors import ScanError

_Run = Callable[[argparse.Namespace], int]
_FULL = (errno.ENOSPC, errno.EDQUOT)

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

_CODES = "exit codes: 0 fine, 1 a problem was found, 2 wrong use or no such trace"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand and its actions."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "scan",
        description="Look at the trace of a run, or change what a run records while it trains. RUN is the\n"
        "folder of a run's outputs, or its 'scan' folder.",
        epilog=f"example:\n  mt-megatron scan level RUN full\n\n{_CODES}",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for word in WORDS:
        action: argparse.ArgumentParser = import_module(f"mt_megatron.cli.scan.{word}").add_parser(actions)
        action.set_defaults(func=_about_places(action.get_default("func")))
    return parser


def code_without(unreadable: Collection[str]) -> int:
    """Exit code of a result that lacks files; ``unreadable``: sentences on them, which stderr gets. 0 without
    any."""
    for sentence in unreadable:
        print(f"mt-megatron scan: not in the result: {sentence}", file=sys.stderr)
    return 1 if unreadable else 0


def _about_places(run: _Run) -> _Run:
    """``run``; where it cannot read or write is said in a line, without a traceback."""

    def told(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except OSError as error:
            # Others are of pipes and connections, or nobody's mistake.
            if error.filename is None and error.errno not in _FULL:
                raise
            if isinstance(error, PermissionError):
                raise ScanError(
                    f"{error.filename}: user {os.geteuid()} has no permission; expected one who may read "
                    "the trace and write the result. A run with --scan-group-readable lets the group of its "
                    "folder read (a trace that is there: chmod -R g+rX RUN/scan, by its owner); --output "
                    "puts a result elsewhere"
                ) from error
            raise ScanError(
                f"{error.filename or 'the file being written'}: {error.strerror}; expected a place that can "
                "be read and written and has room. Give another, or change its permissions"
            ) from error

    return told
