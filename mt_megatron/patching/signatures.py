"""Whether every call that fits an upstream signature also fits the body that takes its place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from .source import Parameter

_Call = tuple[list[str], dict[str, str]]
_RECEIVERS = ("self", "cls", "ctx", "mcs")


def misfit(body: Any, upstream: Sequence[Parameter], *, skip_original: bool) -> str | None:
    """What is wrong with ``body``, or None. ``skip_original``: it is the body of a wrap, which
    takes the original first. Only plain functions are looked at."""
    if isinstance(body, (staticmethod, classmethod)):
        body = body.__func__
    if type(body) is not FunctionType:
        return None
    signature = inspect.signature(body, follow_wrapped=False)
    original = ["original"] if skip_original else []
    for positional, named in _calls(upstream):
        shown = ", ".join([*positional, *(f"{name}=" for name in named)])
        try:
            bound = signature.bind(*original, *positional, **named)
        except TypeError as error:
            return f"the call ({shown}) fits upstream but not the body: {error}"
        expected = {parameter.name for parameter in upstream}
        for name, value in bound.arguments.items():
            if name in expected and isinstance(value, str) and value in expected and name != value:
                return f"the call ({shown}) gives upstream's {value!r} to the body's {name!r}"
    return None


def _calls(upstream: Sequence[Parameter]) -> Iterator[_Call]:
    """Calls that upstream accepts and that between them use each of its freedoms. Every argument
    is the name of the parameter that it is for."""
    plain = [one for one in upstream if one.kind in ("positional", "normal")]
    keyword = [one for one in upstream if one.kind == "keyword"]
    more = ["(more)"] if any(one.kind == "args" for one in upstream) else []
    names = {"_any_other": "(more)"} if any(one.kind == "kwargs" for one in upstream) else {}

    def positions(parameters: Sequence[Parameter]) -> list[str]:
        return [one.name for one in parameters]

    def by_name(parameters: Sequence[Parameter]) -> dict[str, str]:
        return {one.name: one.name for one in parameters}

    yield positions(plain) + more, {**by_name(keyword), **names}
    required = [one for one in plain if one.required]
    yield positions(required), by_name([one for one in keyword if one.required])
    # Nobody passes the receiver of a method by its name.
    fixed = sum(one.kind == "positional" for one in plain)
    if plain and not fixed and plain[0].name in _RECEIVERS:
        fixed = 1
    yield positions(plain[:fixed]), {**by_name(plain[fixed:]), **by_name(keyword), **names}
