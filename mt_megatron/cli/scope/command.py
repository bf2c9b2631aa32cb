"""``mt-megatron scope``: recordings of runs. Each action is a module ``mt_megatron.cli.scope.<word>``.

Such a module has ``add_parser(subparsers) -> argparse.ArgumentParser``, which sets ``func(args) -> int``, as
the subcommands themselves do.
"""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mt_megatron.errors import ConfigError, ScopeError

_Run = Callable[[argparse.Namespace], int]
_FULL = (errno.ENOSPC, errno.EDQUOT)

WORDS = ("report", "open", "status", "watch", "control", "sql", "compare")
"""Actions, in the order of ``--help``."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand and its actions."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "scope",
        description="Look at what a run recorded of its inside, while it trains or afterwards, and ask it\n"
        "for more. RUN is the folder of a run's outputs, or its 'scope' folder.",
        epilog="example:\n  mt-megatron scope report RUN\n\n"
        "exit codes: 0 fine, 1 a problem was found, 2 wrong use or no such recording",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for word in WORDS:
        action: argparse.ArgumentParser = import_module(f"mt_megatron.cli.scope.{word}").add_parser(actions)
        action.set_defaults(func=_about_places(action.get_default("func")))
    return parser


def _about_places(run: _Run) -> _Run:
    """``run``; a recording that is missing or damaged, and a place that cannot be read or written, is wrong
    use: exit code 2, told in a line, since 1 is a finding of ``status`` and ``compare``."""

    def told(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except ScopeError as error:
            raise ConfigError(str(error)) from error
        except PermissionError as error:
            raise ConfigError(
                f"{error.filename}: user {os.geteuid()} has no permission; expected the run's owner. Where "
                "it is a result, --output puts it elsewhere"
            ) from error
        except OSError as error:
            if error.filename is None and error.errno not in _FULL:
                raise  # of pipes and connections
            raise ConfigError(
                f"{error.filename or 'the file being written'}: {error.strerror}; expected a place that can "
                "be read and written and has room. Give another, or change its permissions"
            ) from error

    return told
