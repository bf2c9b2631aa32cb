"""More keyword-only fields for a dataclass, and for every subclass of it that exists already.

Subclasses made later inherit the fields as Python has it. Those made before have an ``__init__`` of
their own that knows nothing of them, so each is met by itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field
from typing import Any

from ..errors import PatchConflictError, PatchTargetError
from .places import MISSING, Attribute

_TABLE = "__dataclass_fields__"

Write = tuple[Attribute, Any, Any]
"""Where, what is there now, and what is to be there."""


def check_fields(body: object) -> None:
    """Raises PatchTargetError when ``body`` is no tuple of keyword-only fields with plain defaults."""
    if not isinstance(body, tuple) or not body or not all(isinstance(one, Field) for one in body):
        raise PatchTargetError("the body of fields is a tuple of dataclasses.Field, and is not empty")
    for one in body:
        if one.kw_only is not True or one.default is NO_DEFAULT:
            raise PatchTargetError(f"the field {one.name!r} is not keyword-only, or has no plain default")


def field_writes(owner: Any, fields: tuple[Field[Any], ...]) -> Iterator[Write]:
    """Every write that makes ``owner`` and its present subclasses accept ``fields``.

    A subclass that has a field or an attribute of such a name keeps its own. Raises
    PatchTargetError when ``owner`` is no dataclass, PatchConflictError when it has one of the names.
    """
    if not isinstance(owner, type) or _TABLE not in vars(owner):
        raise PatchTargetError(f"{owner!r} is no dataclass, so it cannot have more fields")
    taken = [one.name for one in fields if hasattr(owner, one.name) or one.name in vars(owner)[_TABLE]]
    if taken:
        raise PatchConflictError(f"{owner.__qualname__} has {', '.join(taken)} already")
    yield from _one_class(owner, fields)
    for one in fields:
        yield Attribute(owner, one.name), MISSING, one.default
    annotations = vars(owner).get("__annotations__", {})
    new = {**annotations, **{one.name: one.type for one in fields}}
    yield Attribute(owner, "__annotations__"), vars(owner).get("__annotations__", MISSING), new
    for one_class in _subclasses(owner):
        above = one_class.__mro__[: one_class.__mro__.index(owner)]
        known = {name for cls in above for name in (*vars(cls), *vars(cls).get(_TABLE, ()))}
        yield from _one_class(one_class, tuple(one for one in fields if one.name not in known))


def _subclasses(owner: type) -> Iterator[type]:
    found: dict[int, type] = {}
    waiting = [owner]
    while waiting:
        subclasses: list[type] = type.__subclasses__(waiting.pop())
        for one in subclasses:
            if id(one) not in found:
                found[id(one)] = one
                waiting.append(one)
    yield from found.values()


def _one_class(cls: type, fields: tuple[Field[Any], ...]) -> Iterator[Write]:
    own, names = vars(cls), [one.name for one in fields]
    if not fields:
        return
    init = own.get("__init__")
    if init is not None and not _takes_any_keyword(init):
        yield Attribute(cls, "__init__"), init, _init(init, {one.name: one.default for one in fields}, fields)
    if _TABLE not in own:
        return
    yield Attribute(cls, _TABLE), own[_TABLE], {**own[_TABLE], **{one.name: one for one in fields}}
    for name, make in (("__eq__", _eq), ("__repr__", _repr)):
        if name in own and own[name].__code__.co_filename == "<string>" or _generated_repr(own, name):
            yield Attribute(cls, name), own[name], make(own[name], names)


def _generated_repr(own: Mapping[str, Any], name: str) -> bool:
    # dataclasses guards its __repr__ against recursion, so that what was generated is one below.
    inner = getattr(own.get(name), "__wrapped__", None)
    return inner is not None and inner.__code__.co_filename == "<string>"


def _takes_any_keyword(function: Any) -> bool:
    kinds = [one.kind for one in inspect.signature(function).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _init(
    original: Callable[..., None], defaults: Mapping[str, Any], fields: tuple[Field[Any], ...]
) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, default in defaults.items():
            # An __init__ further out may have set it; __post_init__ reads it inside of the original.
            if name in kwargs:
                setattr(self, name, kwargs.pop(name))
            elif name not in vars(self):
                setattr(self, name, default)
        original(self, *args, **kwargs)

    signature = inspect.signature(original)
    more = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
        for one in fields
    ]
    __init__.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *more]
    )
    return __init__


def _eq(original: Callable[[Any, Any], Any], names: list[str]) -> Callable[[Any, Any], Any]:
    @functools.wraps(original)
    def __eq__(self: Any, other: Any) -> Any:
        same = original(self, other)
        if same is not True:
            return same
        return all(getattr(self, name) == getattr(other, name) for name in names)

    return __eq__


def _repr(original: Callable[[Any], str], names: list[str]) -> Callable[[Any], str]:
    @functools.wraps(original)
    def __repr__(self: Any) -> str:
        text = original(self)
        if not text.endswith(")"):
            return text  # inside of its own
        return text[:-1] + "".join(f", {name}={getattr(self, name)!r}" for name in names) + ")"

    return __repr__
