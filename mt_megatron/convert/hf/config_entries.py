"""Entries of a ``config.json`` by name, each of the type that its reader in transformers takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mt_megatron.errors import CheckpointError

_ABSENT = object()

_ALSO = {
    "num_experts": ("num_local_experts",),
    "num_local_experts": ("num_experts",),
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "num_nextn_predict_layers": ("num_mtp_layers",),
}
"""Other names of an entry: what transformers 5 writes in the place of the published ones."""


class Reader:
    """A ``config.json`` and what its architecture takes for entries that are not there."""

    def __init__(self, document: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.document = document
        self._defaults = defaults or {}
        self.known: set[str] = set()
        """Names of the entries that were read, or have no effect here."""

    def get(self, name: str, default: Any = _ABSENT) -> Any:
        """The entry, under any of its names, or the default of its architecture, or ``default``. Raises
        ``CheckpointError`` without any, and for names with different values."""
        names = (name, *_ALSO.get(name, ()))
        self.known.update(names)
        there = {each: self.document[each] for each in names if each in self.document}
        value, *others = there.values() or (_ABSENT,)
        if any(each != value for each in others):
            found = " and ".join(f"{each} = {given!r}" for each, given in there.items())
            raise CheckpointError(
                f"config.json has {found}, two names of one entry; expected one value. Remove the wrong one"
            )
        if value is _ABSENT:
            value = self._defaults.get(name, default)
        if value is _ABSENT:
            raise CheckpointError(
                f"config.json has no {name}, which its architecture needs. Add the entry with the value that "
                "the weights were trained with"
            )
        return value

    def integer(self, name: str, default: Any = _ABSENT, *, least: int = 1) -> int:
        """A whole number of at least ``least``."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise wrong_entry(name, value, f"a whole number of at least {least}")
        return value

    def optional_integer(self, name: str, default: Any = _ABSENT) -> int | None:
        """A whole number of at least 1, or None."""
        return None if self.get(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: Any = _ABSENT) -> float:
        """A number that is not below zero."""
        value = self.get(name, default)
        if not is_number(value) or value < 0:
            raise wrong_entry(name, value, "a number of at least 0")
        return float(value)

    def flag(self, name: str, default: Any = _ABSENT) -> bool:
        """true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise wrong_entry(name, value, "true or false")
        return value

    def require(self, name: str, *expected: Any, default: Any = _ABSENT) -> None:
        """Raise ``CheckpointError`` unless the entry is one of ``expected``; without ``default`` it may be
        absent."""
        value = self.get(name, expected[0] if default is _ABSENT else default)
        if not any(same(value, each) for each in expected):
            wanted = " or ".join(repr(each) for each in expected)
            raise CheckpointError(
                f"config.json has {name} = {value!r}; expected {wanted}: a model here computes nothing else. "
                "If the weights were trained otherwise than this entry says, correct it; else they cannot be "
                "converted"
            )


def same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; a truth value equals no number."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def wrong_entry(name: str, value: Any, expected: str) -> CheckpointError:
    """The error about an entry of another type or range."""
    return CheckpointError(f"config.json has {name} = {value!r}; expected {expected}. Correct that entry")
