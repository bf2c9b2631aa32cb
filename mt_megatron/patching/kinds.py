"""Make the value that a patch puts at its target, from the value that is there."""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

from ..errors import PatchTargetError
from .places import MISSING
from .spec import Patch

_NAMES = ("__module__", "__name__", "__qualname__")


def new_value(patch: Patch, raw: Any, module: str, qualname: str) -> Any:
    """The raw value (a descriptor where the target is one) for a patch that sets its target.

    ``raw`` is what is there now, ``MISSING`` for ``add``. Nothing is changed here, so a body that
    raises leaves everything as it was.
    """
    if patch.kind == "wrap":
        return _like(raw, lambda function: _wrapper(patch.body, function))
    if patch.kind == "value":
        return patch.body(raw)
    if isinstance(patch.body, type):
        return patch.body
    if patch.kind == "add" or type(patch.body) is not FunctionType:
        return _named(patch.body, module, qualname)
    return _like(raw, lambda function: _named(patch.body, module, qualname))


def underlying(raw: Any) -> Any:
    """The function inside a staticmethod, classmethod or property; anything else as it is."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def _like(raw: Any, make: Callable[[Any], Any]) -> Any:
    if isinstance(raw, property):
        return property(make(raw.fget), raw.fset, raw.fdel, raw.__doc__)
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(make(raw.__func__))
    return make(raw)


def _wrapper(body: Callable[..., Any], original: Any) -> Callable[..., Any]:
    # functools.wraps keeps the names that pickle looks a function up by, and __wrapped__ lets
    # inspect.signature see the original's parameters.
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return body(original, *args, **kwargs)

    return wrapper


def _named(body: Any, module: str, qualname: str) -> Any:
    """A copy of the function under the target's name, by which pickle finds it; ``body`` itself
    may serve several plans and stays as it is."""
    if type(body) is not FunctionType:
        return body
    copy = FunctionType(
        body.__code__, body.__globals__, qualname.rpartition(".")[2], body.__defaults__, body.__closure__
    )
    copy.__kwdefaults__ = None if body.__kwdefaults__ is None else dict(body.__kwdefaults__)
    copy.__dict__.update(body.__dict__)
    copy.__annotations__ = dict(body.__annotations__)
    copy.__doc__ = body.__doc__
    copy.__module__, copy.__qualname__ = module, qualname
    return copy


def coded_function(raw: Any, target: str) -> FunctionType:
    """The function whose code holds the literals of ``target``, below descriptors and decorators
    that set ``__wrapped__``."""
    function = underlying(raw)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, FunctionType):
        kind = type(function).__name__
        raise PatchTargetError(f"{target} is a {kind}; literals can be exchanged in Python functions only")
    return function


def with_constants(code: CodeType, table: Mapping[Any, Any], target: str) -> CodeType:
    """``code`` with the literals in ``table`` exchanged, nested code included.

    Raises PatchTargetError when one of them does not occur."""
    used: set[tuple[type, Any]] = set()
    changed = _exchange(code, {(type(old), old): new for old, new in table.items()}, used)
    absent = [old for old in table if (type(old), old) not in used]
    if absent:
        raise PatchTargetError(
            f"the literal(s) {', '.join(map(repr, absent))} do not occur in {target}: "
            f"take them out of the patch's table, or correct them"
        )
    return changed


def _exchange(code: CodeType, table: Mapping[tuple[type, Any], Any], used: set[tuple[type, Any]]) -> CodeType:
    keyword_names = _keyword_names(code)

    def one(value: Any) -> Any:
        if isinstance(value, CodeType):
            return _exchange(value, table, used)
        if isinstance(value, (tuple, frozenset)):
            items = [one(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
        # By type as well: 1, True and 1.0 are equal, but other literals.
        wanted = (type(value), value)
        if wanted not in table:
            return value
        used.add(wanted)
        return table[wanted]

    constants = tuple(
        value if index in keyword_names else one(value) for index, value in enumerate(code.co_consts)
    )
    if all(a is b for a, b in zip(constants, code.co_consts, strict=True)):
        return code
    return code.replace(co_consts=constants)


def _keyword_names(code: CodeType) -> set[int]:
    """Indices of the tuples that name the keywords of a call, which are no literals."""
    found: set[int] = set()
    instructions = list(dis.get_instructions(code))
    for instruction, following in itertools.pairwise(instructions):
        before_call = following.opname in ("CALL_FUNCTION_KW", "CALL_KW")  # before and after 3.11, 3.12
        if instruction.opname == "KW_NAMES" or (instruction.opname == "LOAD_CONST" and before_call):
            found.add(instruction.arg or 0)
    return found


def describe_value(value: Any) -> str:
    """For messages: what kind of thing was found."""
    if value is MISSING:
        return "nothing"
    names = [getattr(value, name, None) for name in _NAMES]
    return f"{type(value).__name__} {names[0]}.{names[2]}" if names[0] and names[2] else repr(value)[:80]
