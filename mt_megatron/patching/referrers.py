"""Find every object that holds another one, and say where: the collector knows what a walk misses.

Asked before anything is changed, so that no reference of the engine's own is among the answers.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import (
    AsyncGeneratorType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any

from .places import Arguments, Attribute, Cell, Defaults, Element, Item, Key, Place, Slot, parts

_IMMUTABLE = (tuple, frozenset, staticmethod, classmethod, property, MethodType)
_TRANSIENT = (FrameType, GeneratorType, CoroutineType, AsyncGeneratorType, TracebackType)
_DEPTH = 6
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: members of other types are fields of C structures


def safely(value: Any, name: str) -> Any:
    """An attribute of an object that nothing is known about: whose ``__getattr__`` may raise
    anything, initialise a device, or answer to every name."""
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 - foreign code
        return None


class Held:
    """The one reference of the engine to an original, while its other holders are counted."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def references(self) -> int:
        """References to the value from anywhere else."""
        return sys.getrefcount(self.value) - _BASE

    def intrinsic(self) -> int:
        """References that come with the value itself: a class is in its own ``__mro__``, in the
        descriptors made for it, in the ``__class__`` cells of its methods, and in the classes that
        its metaclass made for it (such as the backward node of an autograd function)."""
        if not isinstance(self.value, type):
            return 0
        own = vars(self.value).values()
        described = sum(safely(one, "__objclass__") is self.value for one in own)
        made = sum(one is self.value for cls in companions(self.value) for one in vars(cls).values())
        return 1 + described + len(class_cells(self.value)) + made


_BASE = 0
_BASE = Held(object()).references()


@dataclass(frozen=True, slots=True)
class Holder:
    """``place`` holds ``held``, which is an original or an immutable object with one inside."""

    place: Place
    held: Any


@dataclass
class Search:
    """What was found: places that can be written, and descriptions of what cannot."""

    holders: list[Holder] = field(default_factory=list)
    stuck: list[tuple[str, int]] = field(default_factory=list)
    """A holder that cannot be written, and the id of the original that it holds."""

    passing: list[str] = field(default_factory=list)
    """Calls in progress and references that the collector does not see: they go on with the
    original and hold it no longer than they last."""

    tally: Counter[int] = field(default_factory=Counter)
    """References seen, by the id of the original."""


def companions(cls: type) -> list[type]:
    """Classes in the ``__dict__`` of a class that refer back to it: they belong to it."""
    nested = [one for one in vars(cls).values() if isinstance(one, type) and one is not cls]
    return [one for one in nested if any(value is cls for value in vars(one).values())]


def class_cells(cls: type) -> set[int]:
    """Ids of the cells through which methods of ``cls`` find it for ``super()``."""
    found: set[int] = set()
    for value in vars(cls).values():
        for function in (value, *parts(value)):
            names = getattr(safely(function, "__code__"), "co_freevars", ())
            for name, cell in zip(names, safely(function, "__closure__") or (), strict=False):
                if name == "__class__":
                    found.add(id(cell))
    return found


def search(originals: Sequence[Held], ignored: Collection[int]) -> Search:
    """All holders of the originals, whatever module or object they are in, but for the ignored
    ones, which are given by their ids so that the question adds no holder."""
    found = Search()
    skip = {id(one) for one in originals} | set(ignored)
    modules = {id(vars(one)): one for one in list(sys.modules.values()) if isinstance(one, ModuleType)}
    wanted = [held.value for held in originals]
    belonging: set[int] = set()
    roots = {id(value): id(value) for value in wanted}
    for value in wanted:
        if isinstance(value, type):
            skip |= class_cells(value) | {id(value.__mro__)}
            belonging |= set(map(id, companions(value)))
    seen: set[int] = set()
    for _ in range(_DEPTH):
        if not wanted:
            break
        referrers = gc.get_referrers(*wanted)
        skip |= {id(wanted), id(referrers)}
        owners = _class_dicts([one for one in referrers if _looks_like_class_dict(one)], skip)
        deeper: list[Any] = []
        skip.add(id(deeper))
        ids = {id(value) for value in wanted}
        for referrer in referrers:
            if id(referrer) in skip:
                continue
            inside = [value for value in gc.get_referents(referrer) if id(value) in ids]
            skip.add(id(inside))
            found.tally.update(map(id, inside))
            if isinstance(referrer, _IMMUTABLE):
                if id(referrer) not in seen:
                    deeper.append(referrer)
                    roots[id(referrer)] = roots[id(inside[0])]
                seen.add(id(referrer))
                continue
            owner = modules.get(id(referrer)) or owners.get(id(referrer))
            if id(owner) in belonging:
                continue
            for value in {id(one): one for one in inside}.values():
                _place(referrer, owner, value, found, roots[id(value)])
        wanted = deeper
    return found


def _place(referrer: Any, owner: Any, value: Any, found: Search, root: int) -> None:
    before = len(found.holders)
    if isinstance(referrer, _TRANSIENT):
        found.passing.append(describe(referrer))
        return
    for place in _places(referrer, owner, value):
        found.holders.append(Holder(place, value))
    if len(found.holders) == before and not _harmless(referrer, value):
        stuck = (describe(referrer), root)
        if stuck not in found.stuck:
            found.stuck.append(stuck)


def _places(referrer: Any, owner: Any, value: Any) -> Iterable[Place]:
    if isinstance(referrer, dict):
        for key, item in list(referrer.items()):
            if item is value:
                yield Attribute(owner, key) if owner is not None else Item(referrer, key, describe(referrer))
            if key is value:
                yield Key(referrer, describe(referrer))
    elif isinstance(referrer, (list, set)):
        yield Element(referrer, describe(referrer))
    elif isinstance(referrer, CellType):
        yield Cell(referrer)
    elif isinstance(referrer, functools.partial):
        if referrer.func is value or referrer.args is value:
            yield Arguments(referrer)
    elif isinstance(referrer, FunctionType):
        if referrer.__defaults__ is value:
            yield Defaults(referrer)
    elif not isinstance(referrer, type):
        yield from _instance_places(referrer, value)


def _instance_places(instance: Any, value: Any) -> Iterable[Place]:
    direct = gc.get_referents(instance)
    # Past any __getattr__ of the instance's class, which is foreign code.
    try:
        attributes = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        attributes = {}
    # A dict that was there before is a referrer of its own; one made just now held its values in
    # the instance itself.
    if not any(one is attributes for one in direct):
        for name, item in list(attributes.items()):
            if item is value:
                yield Item(attributes, name, describe(instance))
    for base in type(instance).__mro__:
        for name, member in vars(base).items() if base.__flags__ & _HEAP_TYPE else ():
            if isinstance(member, MemberDescriptorType):
                try:
                    item = member.__get__(instance)
                except AttributeError:
                    continue
                if item is value:
                    yield Slot(instance, name)


def _looks_like_class_dict(value: Any) -> bool:
    return type(value) is dict and "__module__" in value and "__doc__" in value


def _class_dicts(candidates: list[Any], skip: set[int]) -> dict[int, type]:
    """Which class each dict is the ``__dict__`` of; a class must be written through setattr."""
    if not candidates:
        return {}
    owners = gc.get_referrers(*candidates)
    skip |= {id(candidates), id(owners)}
    known = {id(one) for one in candidates}
    return {
        id(value): owner
        for owner in owners
        if isinstance(owner, type)
        for value in gc.get_referents(owner)
        if id(value) in known
    }


def _harmless(referrer: Any, value: Any) -> bool:
    """Annotations and their caches name a class and decide nothing when the program runs; the
    descriptors of a class belong to it."""
    if isinstance(referrer, FunctionType) or safely(referrer, "__objclass__") is value:
        return True
    kind = type(referrer)
    return kind.__module__ in ("typing", "types") or kind.__name__ == "_lru_list_elem"


def describe(value: Any) -> str:
    """What holds it, for a person: never the repr of foreign data."""
    if isinstance(value, ModuleType):
        return f"module {value.__name__!r}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    name = safely(value, "__qualname__")
    if isinstance(name, str):
        return f"{type(value).__name__} {safely(value, '__module__')}.{name}"
    if type(value) is dict:
        keys = ", ".join(repr(key) for key in list(value)[:4] if isinstance(key, (str, int)))
        return f"a dict with the keys {keys}{', ...' if len(value) > 4 else ''}"
    if isinstance(value, (list, set, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, FrameType):
        return f"a call of {value.f_code.co_name} in progress"
    return f"an instance of {type(value).__module__}.{type(value).__qualname__}"
