"""Entry point of ``mt-megatron``: finds the subcommand, shows errors, sets the exit code.

Exit codes: 0 fine, 1 a problem was found, 2 wrong use (unknown options, an impossible
configuration). A subcommand is a module ``mt_megatron.cli.<name>`` with
``add_parser(subparsers) -> argparse.ArgumentParser``, which sets ``func(args) -> int``. With
``set_defaults(config_arguments=True)`` every option that argparse does not know arrives in
``args.config_argv``, for ``mt_megatron.training.arguments.load_config``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import mt_megatron
from mt_megatron.errors import ConfigError, MtMegatronError, RunError

COMMANDS = (
    "run",
    "pretrain",
    "launch",
    "prepare",
    "preprocess",
    "convert",
    "plan",
    "diverge",
    "scan",
    "doctor",
    "patches",
)
"""Subcommands, in the order of ``--help``."""


class _Parser(argparse.ArgumentParser):
    """Examples keep their line breaks, and ``--mod`` is not taken for ``--model``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def build_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser with the subcommands named; each one's module is imported here and not before."""
    parser = _Parser(
        prog="mt-megatron",
        description="Train the unmodified Megatron-Core 0.9.0 on CPU, CUDA and other devices.",
        epilog="example:\n  mt-megatron doctor\n\nexit codes: 0 fine, 1 a problem was found, 2 wrong use",
    )
    parser.add_argument("--version", action="version", version=f"mt-megatron {mt_megatron.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        import_module(f"mt_megatron.cli.{command}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mt-megatron`` with ``argv`` (the process's own by default) and return the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(given)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(given: list[str]) -> int:
    # Only the subcommand in question is imported: doctor must run where the others cannot.
    wanted = [given[0]] if given and given[0] in COMMANDS else list(COMMANDS)
    try:
        parser = build_parser(wanted)
        args, rest = parser.parse_known_args(given)
        if rest and not getattr(args, "config_arguments", False):
            parser.error(f"unknown arguments: {' '.join(rest)}")
        args.config_argv = rest
        return int(args.func(args))
    except (ConfigError, RunError) as error:
        return _fail(error, 2)
    except MtMegatronError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    finally:
        # What is still buffered may find nobody to read it; at exit nobody could be told. Also where argparse
        # ends the process, as after --help and --list-options.
        sys.stdout.flush()


def _fail(error: MtMegatronError, code: int) -> int:
    print(f"mt-megatron: {type(error).__name__}: {error}", file=sys.stderr)
    return code
