"""What an import statement gets in a scope, and which object each such name stands for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .places import MISSING

Lookup = Callable[[Any], Any]
"""The replacement that a scope means by an object, or the object itself."""


class Seen:
    """Answers statements and remembers what was handed out, so that it can be taken back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handed: dict[tuple[int, str], tuple[Any, Any, str]] = {}

    @property
    def handed(self) -> list[tuple[Any, Any, str]]:
        """Replacement, original and name of everything a ``from`` statement got out of a view."""
        with self._lock:
            return list(self._handed.values())

    def clear(self) -> None:
        with self._lock:
            self._handed.clear()

    def answer(self, module: ModuleType, wanted: Sequence[str], lookup: Lookup) -> Any:
        """``module`` itself, the view of it, or a copy in which the ``wanted`` names are replaced."""
        shown = _view_of(module, lookup)
        if not wanted:
            return shown
        if "*" in wanted:
            wanted = [*getattr(shown, "__all__", vars(shown))]
        real = vars(module)
        changed: dict[str, Any] = {}
        for name in wanted:
            old = real.get(name, MISSING)
            # A name that the view refuses is an ImportError of the statement, as python words it.
            new = lookup(old) if shown is module else getattr(shown, name, MISSING)
            if old is MISSING or new is MISSING or new is old:
                continue
            changed[name] = new
            with self._lock:
                self._handed.setdefault((id(new), name), (new, old, name))
        return _Replaced(module, changed) if changed and shown is module else shown


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
    inside = getattr(shown, name, module)
    return inside if isinstance(inside, ModuleType) else module
