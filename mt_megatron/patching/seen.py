"""What an import statement gets in a scope, and which objects a view has in place of others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

_ATOMS = (type(None), bool, int, float, str, tuple, frozenset)

Lookup = Callable[[Any], Any]
"""The replacement that a scope means by an object, or the object itself."""


def answer(module: ModuleType, wanted: Sequence[str], lookup: Lookup) -> Any:
    """For one statement: ``module`` itself, the view of it, or a copy in which the ``wanted`` names are
    replaced."""
    shown = _view_of(module, lookup)
    if not wanted or shown is not module:
        return shown
    real = vars(module)
    if "*" in wanted:
        wanted = [*real]
    changed = {name: lookup(real[name]) for name in wanted if name in real}
    changed = {name: new for name, new in changed.items() if new is not real[name]}
    return _Replaced(module, changed) if changed else module


def inside(views: Iterable[tuple[Any, Any]]) -> list[tuple[str, Any, Any]]:
    """Name, original and replacement of all that views (pairs of module and view) have in place of the
    modules' own: what a scope may have taken out of them. Left out is what one of the modules holds
    as its own, since nobody can tell why it is held."""
    waiting, seen = [*views], set[int]()
    found: list[tuple[str, Any, Any]] = []
    originals: set[int] = set()
    while waiting:
        real, view = waiting.pop()
        if real is view or id(view) in seen or not _modules(real, view):
            continue
        seen.add(id(view))
        originals.update(map(id, list(vars(real).values())))
        for name, new in list(vars(view).items()):
            old = vars(real).get(name, new)
            if old is not new and not name.startswith("__"):
                found.append((name, old, new))
                waiting.append((old, new))
    return [one for one in found if id(one[2]) not in originals and not isinstance(one[2], _ATOMS)]


def _modules(*values: Any) -> bool:
    return all(isinstance(value, ModuleType) for value in values)


class _Replaced(ModuleType):
    """Lives for one statement: ``module`` with some names replaced."""

    def __init__(self, module: ModuleType, changed: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        vars(self).update({**vars(module), **changed, "_module": module})

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


def _view_of(module: ModuleType, lookup: Lookup) -> Any:
    """The view of ``module``, also where a view of a package around it has another module there."""
    found = lookup(module)
    parent, _, name = str(getattr(module, "__name__", "")).rpartition(".")
    if found is not module or parent not in sys.modules:
        return found
    around = sys.modules[parent]
    shown = _view_of(around, lookup)
    if shown is around:
        return module
    below = getattr(shown, name, module)
    return below if isinstance(below, ModuleType) else module
