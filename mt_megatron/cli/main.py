"""Entry point of ``mt-megatron``: finds the subcommand, shows errors, sets the exit code.

Exit codes: 0 fine, 1 a problem was found, 2 wrong use (unknown options, an impossible
configuration), 130 interrupted (Ctrl-C). A subcommand is a module ``mt_megatron.cli.<name>`` or
``mt_megatron.cli.<name>.command`` with
``add_parser(subparsers) -> argparse.ArgumentParser``, which sets ``func(args) -> int``. With
``set_defaults(config_arguments=True)`` every option that argparse does not know arrives in
``args.config_argv``, for ``mt_megatron.config.parse.load_config``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import mt_megatron
from mt_megatron.cli.commands import COMMANDS, NEXT, listing, module_of
from mt_megatron.errors import ConfigError, MtMegatronError, RunError
from mt_megatron.near_names import hint

# The argument parser of every subcommand.


class Parser(argparse.ArgumentParser):
    """Examples keep their line breaks, ``--mod`` is not taken for ``--model``, a slip gets a suggestion.

    Two defaults of a parser tell what becomes of words that it does not know: ``config_arguments=True``
    leaves them to ``mt_megatron.config.parse``, ``after_dashes="NAME"`` says that options of NAME
    stand after ``--``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._given: list[str] = []

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse does; what is unknown is an error of the subcommand that got it."""
        self._given = list(sys.argv[1:] if args is None else args)
        leading = self.get_default("leading_word")
        if leading and self._given and not self._given[0].startswith("-"):
            # A positional argument would also take the value of an option that only a configuration knows.
            self._given = [leading, *self._given]
        found, rest = super().parse_known_args(self._given, namespace)
        # Of several parsers it is the innermost's business, which has no subcommands.
        if rest and self._subparsers is None:
            if not self.get_default("config_arguments"):
                self.error(self._unknown(rest))
            from mt_megatron.config.parse import check_names

            check_names(rest, [option[2:] for option in self._options()])
        return found, rest

    def error(self, message: str) -> NoReturn:
        """End with 2: usage, what is wrong, what was probably meant."""
        if message.startswith(("the following arguments are required", "one of the arguments")):
            slips = [word for word in self._options_given() if hint(_name(word), self._options())]
            # A mistyped option is why another is missing.
            message = self._unknown(slips) if slips else message
        self.print_usage(sys.stderr)
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end} See {self.prog} --help.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices]
            raise argparse.ArgumentError(
                action, f"found {str(value)!r}; expected one of {', '.join(known)}.{hint(str(value), known)}"
            )

    def _unknown(self, words: Sequence[str]) -> str:
        options = [_name(word) for word in words if word.startswith("-")]
        said = [f"there is no option {option}.{hint(option, self._options())}" for option in options]
        others = self.get_default("after_dashes")
        if others is not None and not any(sentence.endswith("?") for sentence in said):
            said.append(f"Options of {others} stand after --: {self.prog} [options] -- {options[0]} ...")
        return " ".join(said) or f"unknown arguments: {' '.join(words)}"

    def _options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]

    def _options_given(self) -> list[str]:
        before = self._given[: self._given.index("--")] if "--" in self._given else self._given
        known = self._option_string_actions
        return [word for word in before if word.startswith("--") and _name(word) not in known]


def _name(word: str) -> str:
    return word.partition("=")[0]


# The entry point.


def build_parser(command: str) -> argparse.ArgumentParser:
    """The parser of one subcommand; its module is imported here and not before."""
    parser = Parser(prog="mt-megatron")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    added = import_module(module_of(command)).add_parser(subparsers)
    if command in NEXT:
        added.epilog = f"{added.epilog}\n\nnext: {NEXT[command]}"
    return parser


def _top() -> Parser:
    parser = Parser(
        prog="mt-megatron",
        usage="mt-megatron COMMAND [options]",
        description="Train the unmodified Megatron-Core 0.9.0 on CPU, CUDA and other devices.",
        epilog=f"{listing()}\n\nexample:\n  mt-megatron doctor\n  mt-megatron pretrain --help\n\n"
        "exit codes: 0 fine, 1 a problem was found, 2 wrong use",
    )
    parser.add_argument("--version", action="version", version=f"mt-megatron {mt_megatron.__version__}")
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
    try:
        if not given or given[0] not in COMMANDS:
            _nothing_to_do(given)
        # Only the subcommand in question is imported: doctor must run where the others cannot.
        args, rest = build_parser(given[0]).parse_known_args(given)
        args.config_argv = rest
        return int(args.func(args))
    except (ConfigError, RunError) as error:
        return _fail(error, 2)
    except MtMegatronError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        # A run takes the signal itself while it trains.
        when = ": no step was under way" if given[0] in ("launch", "pretrain") else ""
        print(f"mt-megatron {given[0]}: interrupted{when}", file=sys.stderr)
        return 130
    finally:
        # What is still buffered may find nobody to read it; at exit nobody could be told. Also where argparse
        # ends the process, as after --help and --list-options.
        sys.stdout.flush()


def _nothing_to_do(given: list[str]) -> NoReturn:
    """``--help``, ``--version``, or wrong use."""
    parser = _top()
    if not given:
        parser.error("no command is given")
    if not given[0].startswith("-"):
        parser.error(f"there is no command {given[0]!r}.{hint(given[0], COMMANDS)}")
    parser.parse_args(given)
    parser.error("no command is given")


def _fail(error: MtMegatronError, code: int) -> int:
    print(f"mt-megatron: {type(error).__name__}: {error}", file=sys.stderr)
    return code
