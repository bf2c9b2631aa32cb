"""Where a value can be held: places that can be written, checked and written back exactly."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, Protocol

Owned = Literal["ours", "gone", "other"]


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = _Missing()
"""Stands for an attribute that its owner's own ``__dict__`` does not have."""


class Place(Protocol):
    """One reference that can be exchanged. ``key`` tells whether two places are the same one."""

    @property
    def key(self) -> tuple[Any, ...]: ...

    def swap(self, old: Any, new: Any) -> None:
        """Exchange ``old``, which is there now, for ``new``."""

    def state(self, value: Any) -> Owned:
        """Whether ``value`` is what is there now."""

    def describe(self) -> str:
        """For messages, such as ``name 'f' of module 'a.b'``."""


class Attribute:
    """A name in a module's or a class's own ``__dict__``, as a raw descriptor."""

    __slots__ = ("owner", "name")

    def __init__(self, owner: ModuleType | type, name: str) -> None:
        self.owner = owner
        self.name = name

    @property
    def key(self) -> tuple[Any, ...]:
        return ("attribute", id(self.owner), self.name)

    def read(self) -> Any:
        return vars(self.owner).get(self.name, MISSING)

    def swap(self, old: Any, new: Any) -> None:
        # Around any __setattr__ of a metaclass or a module subclass: what is put back has to be
        # the very object that was there.
        if isinstance(self.owner, type):
            if new is MISSING:
                type.__delattr__(self.owner, self.name)
            else:
                type.__setattr__(self.owner, self.name, new)
        elif new is MISSING:
            del vars(self.owner)[self.name]
        else:
            vars(self.owner)[self.name] = new

    def state(self, value: Any) -> Owned:
        return "ours" if self.read() is value else "other"

    def describe(self) -> str:
        if isinstance(self.owner, type):
            return f"attribute {self.name!r} of class {self.owner.__module__}.{self.owner.__qualname__}"
        return f"name {self.name!r} of module {self.owner.__name__!r}"


class Item:
    """A value of a dict, under a key that stays."""

    __slots__ = ("container", "item", "label")

    def __init__(self, container: dict[Any, Any], item: Any, label: str) -> None:
        self.container = container
        self.item = item
        self.label = label

    @property
    def key(self) -> tuple[Any, ...]:
        return ("item", id(self.container), self.item)

    def swap(self, old: Any, new: Any) -> None:
        self.container[self.item] = new

    def state(self, value: Any) -> Owned:
        now = self.container.get(self.item, MISSING)
        return "ours" if now is value else "gone" if now is MISSING else "other"

    def describe(self) -> str:
        return f"value of key {_short(self.item)} in {self.label}"


class Key:
    """A key of a dict; the order of the dict stays."""

    __slots__ = ("container", "label")

    def __init__(self, container: dict[Any, Any], label: str) -> None:
        self.container = container
        self.label = label

    @property
    def key(self) -> tuple[Any, ...]:
        return ("key", id(self.container))

    def swap(self, old: Any, new: Any) -> None:
        items = [(new if key is old else key, value) for key, value in self.container.items()]
        self.container.clear()
        self.container.update(items)

    def state(self, value: Any) -> Owned:
        return "ours" if any(key is value for key in self.container) else "gone"

    def describe(self) -> str:
        return f"a key of {self.label}"


class Element:
    """Every occurrence in a list or a set."""

    __slots__ = ("container", "label")

    def __init__(self, container: list[Any] | set[Any], label: str) -> None:
        self.container = container
        self.label = label

    @property
    def key(self) -> tuple[Any, ...]:
        return ("element", id(self.container))

    def swap(self, old: Any, new: Any) -> None:
        if isinstance(self.container, set):
            self.container.remove(old)
            self.container.add(new)
            return
        for index, value in enumerate(self.container):
            if value is old:
                self.container[index] = new

    def state(self, value: Any) -> Owned:
        return "ours" if any(one is value for one in self.container) else "gone"

    def describe(self) -> str:
        return f"an element of {self.label}"


class Defaults:
    """The tuple of a function's positional default arguments, as a whole."""

    __slots__ = ("function",)

    def __init__(self, function: FunctionType) -> None:
        self.function = function

    @property
    def key(self) -> tuple[Any, ...]:
        return ("defaults", id(self.function))

    def swap(self, old: Any, new: Any) -> None:
        self.function.__defaults__ = new

    def state(self, value: Any) -> Owned:
        return "ours" if self.function.__defaults__ is value else "other"

    def describe(self) -> str:
        return f"a default argument of {_name(self.function)}"


class Cell:
    """A variable of a closure."""

    __slots__ = ("cell",)

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    @property
    def key(self) -> tuple[Any, ...]:
        return ("cell", id(self.cell))

    def swap(self, old: Any, new: Any) -> None:
        self.cell.cell_contents = new

    def state(self, value: Any) -> Owned:
        try:
            return "ours" if self.cell.cell_contents is value else "other"
        except ValueError:
            return "gone"

    def describe(self) -> str:
        return "a variable of a closure"


class Slot:
    """An attribute of an instance that is not in a ``__dict__``."""

    __slots__ = ("instance", "name")

    def __init__(self, instance: Any, name: str) -> None:
        self.instance = instance
        self.name = name

    @property
    def key(self) -> tuple[Any, ...]:
        return ("slot", id(self.instance), self.name)

    def swap(self, old: Any, new: Any) -> None:
        object.__setattr__(self.instance, self.name, new)

    def state(self, value: Any) -> Owned:
        now = getattr(self.instance, self.name, MISSING)
        return "ours" if now is value else "gone" if now is MISSING else "other"

    def describe(self) -> str:
        return f"attribute {self.name!r} of {_instance(self.instance)}"


class Arguments:
    """Function and positional arguments of a ``functools.partial``, as the pair of both."""

    __slots__ = ("partial",)

    def __init__(self, partial: partial[Any]) -> None:
        self.partial = partial

    @property
    def key(self) -> tuple[Any, ...]:
        return ("partial", id(self.partial))

    def read(self) -> tuple[Any, tuple[Any, ...]]:
        return self.partial.func, self.partial.args

    def swap(self, old: Any, new: Any) -> None:
        attributes = vars(self.partial) or None
        self.partial.__setstate__((*new, self.partial.keywords, attributes))  # type: ignore[attr-defined]

    def state(self, value: Any) -> Owned:
        now = self.read()
        return "ours" if now[0] is value[0] and now[1] is value[1] else "other"

    def describe(self) -> str:
        return f"a functools.partial of {_name(self.partial.func)}"


class Code:
    """The code object of a function."""

    __slots__ = ("function",)

    def __init__(self, function: FunctionType) -> None:
        self.function = function

    @property
    def key(self) -> tuple[Any, ...]:
        return ("code", id(self.function))

    def swap(self, old: CodeType, new: CodeType) -> None:
        self.function.__code__ = new

    def state(self, value: Any) -> Owned:
        return "ours" if self.function.__code__ is value else "other"

    def describe(self) -> str:
        return f"the code of {_name(self.function)}"


def exchange(value: Any, old: Any, new: Any) -> Any:
    """``value`` with ``old`` exchanged for ``new`` inside immutable holders (rebuilt); the same
    object when ``old`` is not in it."""
    if value is old:
        return new
    if old is new or not contains(value, old):
        return value
    if isinstance(value, tuple):
        items = [exchange(item, old, new) for item in value]
        return tuple.__new__(type(value), items)
    if isinstance(value, frozenset):
        return type(value)(exchange(item, old, new) for item in value)
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(exchange(value.__func__, old, new))
    if isinstance(value, property):
        fget, fset, fdel = (exchange(one, old, new) for one in (value.fget, value.fset, value.fdel))
        return type(value)(fget, fset, fdel, value.__doc__)
    if isinstance(value, MethodType):
        return MethodType(exchange(value.__func__, old, new), exchange(value.__self__, old, new))
    return value


def contains(value: Any, wanted: Any) -> bool:
    """Whether ``wanted`` is ``value`` or sits in the immutable holders that ``exchange`` rebuilds."""
    return value is wanted or any(contains(inner, wanted) for inner in parts(value))


def parts(value: Any) -> Iterator[Any]:
    """What an immutable holder holds; nothing for everything else."""
    if isinstance(value, (tuple, frozenset)):
        yield from value
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (one for one in (value.fget, value.fset, value.fdel) if one is not None)
    elif isinstance(value, MethodType):
        yield value.__func__
        yield value.__self__


def underlying(raw: Any) -> Any:
    """The function inside a staticmethod, classmethod or property; anything else as it is."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def _instance(value: Any) -> str:
    return f"an instance of {type(value).__module__}.{type(value).__qualname__}"
