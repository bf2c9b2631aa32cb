"""Targets that other code changed before ``patch()``: they hold another function than their source defines.

Only what is certain is reported: a target that its source binds by ``def`` alone holds that very function,
below as many wrappers as it has decorators there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mt_megatron.patching.digest import parse_file
from mt_megatron.patching.places import MISSING, Attribute, underlying
from mt_megatron.patching.plan import Step
from mt_megatron.patching.rebind import function_names
from mt_megatron.patching.referrers import describe, safely
from mt_megatron.patching.source import decorators_of

_KINDS = ("wrap", "replace", "constant")
_DESCRIPTORS = ("staticmethod", "classmethod", "property")
_INSIDE = ("__wrapped__", "_torchdynamo_orig_callable", "_torchdynamo_inline", "func")
"""Attributes by which decorators of functools, contextlib and torch name the function inside."""

_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class PriorChange:
    """Another function at a target than its source defines."""

    text: str
    """Description of what is there, where it was made, and which names still mean upstream's function."""

    is_split: bool
    """True where other names mean upstream's function: whoever uses them would not have the patched one."""


def prior_change(step: Step, place: Attribute) -> PriorChange | None:
    """The function that other code put at the target of ``step``; None where the target holds upstream's
    function, or where it cannot be told."""
    source = step.source
    if source is None or step.patch.digest is None or step.patch.kind not in _KINDS:
        return None
    present, module = place.read(), sys.modules[step.module]
    outer = step.qualname.rpartition(".")[0]
    owner = place.owner
    other_class = isinstance(owner, type) and (owner.__module__, owner.__qualname__) != (step.module, outer)
    if present is MISSING and not other_class:
        return None  # a definition under an ``if`` that was not taken
    upstreams = _Upstreams.of(step, module, source.definition.decorators)
    if not other_class and upstreams.made(underlying(present)) is not False:
        return None
    definitions = _definitions(Path(source.path), step.qualname)
    if not definitions:
        return None
    upstreams = _Upstreams.of(step, module, max(definitions, key=_count_wrappers))
    if not other_class and upstreams.made(underlying(present)) is not False:
        return None
    found = owner if other_class and present is MISSING else present
    names = [
        name.describe()
        for name in function_names(lambda function: upstreams.made(function) is True, step.package)
        if name.key != place.key
    ]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    kept = f"goes on at {shown}" if names else "has no other name"
    text = f"holds {_describe(found)}; upstream's own function {kept}"
    return PriorChange(text=text, is_split=bool(names))


@dataclass(frozen=True, kw_only=True)
class _Upstreams:
    """The function that the source of a target defines."""

    file: str
    """Of the imported module."""

    qualname: str
    wrappers: int
    """Most wrappers that the decorators may have put around it."""

    homes: frozenset[str]
    """Top-level packages of the decorators and of the target."""

    @classmethod
    def of(cls, step: Step, module: ModuleType, decorators: tuple[str, ...]) -> _Upstreams:
        names = vars(module)
        roots = [names.get(text.partition("(")[0].partition(".")[0]) for text in decorators]
        homes = [safely(root, "__name__" if isinstance(root, ModuleType) else "__module__") for root in roots]
        return cls(
            file=str(names.get("__file__")),
            qualname=step.qualname,
            wrappers=_count_wrappers(decorators),
            homes=frozenset({step.package, *(str(home).partition(".")[0] for home in homes)}),
        )

    def made(self, function: Any) -> bool | None:
        """True where ``function`` is it, as decorated; None where a decorator's object hides the inside."""
        for depth in range(self.wrappers + 1):
            if self._is(function):
                return True
            if depth == self.wrappers:
                break
            inside = next((one for name in _INSIDE if (one := safely(function, name)) is not None), None)
            if inside is None:
                return self._hides(function)
            function = inside
        return False

    def _is(self, function: Any) -> bool:
        return (
            type(function) is FunctionType
            and function.__qualname__ == self.qualname
            and function.__code__.co_filename == self.file
        )

    def _hides(self, function: Any) -> bool | None:
        if type(function) is not FunctionType:
            return None
        home = str(function.__globals__.get("__name__", "")).partition(".")[0]
        return None if home in self.homes else False


def _count_wrappers(decorators: tuple[str, ...]) -> int:
    accessors = (".getter", ".setter", ".deleter")
    return sum(one not in _DESCRIPTORS and not one.endswith(accessors) for one in decorators)


def _definitions(path: Path, qualname: str) -> list[tuple[str, ...]] | None:
    try:
        return decorators_of(parse_file(path)[1], qualname)
    except (OSError, SyntaxError):
        return None  # changed since it was planned


def _describe(found: Any) -> str:
    # The names of a wrapper are mostly those of what it wraps: its code tells who made it.
    function = underlying(found)
    code = safely(function, "__code__")
    if not isinstance(code, CodeType):
        return describe(function)
    home = (safely(function, "__globals__") or {}).get("__name__", "?")
    return f"{code.co_name} of {home} ({code.co_filename}:{code.co_firstlineno})"
