"""The argument parser of every subcommand: says which option or word was probably meant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from mt_megatron.near_names import hint


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
