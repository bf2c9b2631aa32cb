"""The ``rebind`` kind: what some modules mean by a name, while its owner keeps the original."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mt_megatron.errors import PatchConflictError
from mt_megatron.patching.importlib_bootstrap import unwatch, watch
from mt_megatron.patching.journal import Journal
from mt_megatron.patching.places import Attribute, exchange
from mt_megatron.patching.plan import Step
from mt_megatron.patching.rebind import in_package, loaded_modules, scoped_places
from mt_megatron.patching.scope import Scope

# What an import statement gets in a scope, and which objects a view has in place of others.

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


# The rebinds of a plan.


@dataclass(frozen=True)
class _Meaning:
    original: Any
    replacement: Any
    patch: str
    name: str


class ScopedRebinds:
    """All rebinds of a plan, as one map per scope from the identity of an original, so that a
    module is looked through once however many there are.

    ``extra`` is whom the caller of the plan wants every rebind to reach beside its own scope."""

    def __init__(self, steps: Iterable[Step], journal: Journal, extra: Scope | None = None) -> None:
        self._waiting = {step.patch.id: step for step in steps}
        self._journal = journal
        self._meanings: dict[tuple[str, ...], dict[int, _Meaning]] = {}
        self._targets: set[tuple[str, str]] = {
            (step.module, step.qualname) for step in self._waiting.values()
        }
        self._own = Scope(prefix for step in self._waiting.values() for prefix in step.patch.scope)
        self._extra = (extra or Scope()) if self._waiting else Scope()
        self._everyone = self._own | self._extra
        self.prefixes = self._everyone.prefixes

    @property
    def waiting(self) -> list[Step]:
        """Rebinds whose original does not exist yet, because its module is not imported."""
        return list(self._waiting.values())

    def covers(self, module: str) -> bool:
        return any(in_package(module, prefix) for prefix in self.prefixes)

    def start(self) -> None:
        """Answer import statements from now on, until ``give_back``."""
        if self._own or self._extra:
            watch(self)

    def claim(self, step: Step) -> bool:
        """Whether the caller is the one to resolve ``step``: two threads may end their imports at
        the same time."""
        return self._waiting.pop(step.patch.id, None) is not None

    def take(self, step: Step, original: Any, replacement: Any) -> None:
        """From now on ``step`` is known. Raises PatchConflictError when another rebind means
        something else by the same object."""
        for scope, meanings in self._meanings.items():
            other = meanings.get(id(original))
            overlap = any(in_package(a, b) or in_package(b, a) for a in scope for b in step.patch.scope)
            if other is not None and (overlap or self._extra) and other.replacement is not replacement:
                raise PatchConflictError(
                    f"patches {other.patch} and {step.patch.id} rebind the same object under two names: "
                    f"keep one"
                )
        name = (step.qualname or step.module).rpartition(".")[2]
        known = self._meanings.setdefault(step.patch.scope, {})
        known.setdefault(id(original), _Meaning(original, replacement, step.patch.id, name))

    def resolve(self, ready: Callable[[Step], bool], find: Callable[[Step], tuple[Any, Any]]) -> bool:
        """Take every waiting step whose owner is ready; whether there was one."""
        steps = [step for step in self.waiting if ready(step) and self.claim(step)]
        for step in steps:
            self.take(step, *find(step))
        return bool(steps)

    def apply(self, modules: Sequence[ModuleType] | None = None) -> None:
        """Rebind in the given modules, or in all imported ones that a scope covers."""
        for scope, meanings in list(self._meanings.items()):
            found = list(self._loaded(scope)) if modules is None else modules
            for module in found:
                if self._inside(vars(module), scope):
                    self._apply(module, meanings)

    def see(
        self, module: ModuleType, names: Mapping[str, Any], wanted: Sequence[str], *, in_function: bool
    ) -> Any:
        """Answer one import statement of the module with the ``__dict__`` ``names``."""
        if not self._everyone.covers(names):
            return module
        if not in_function and self._own.covers(names):
            return module  # its own names are rebound when its import is over
        known = [each for scope, each in list(self._meanings.items()) if self._inside(names, scope)]

        def lookup(value: Any) -> Any:
            for meanings in known:
                meaning = meanings.get(id(value))
                if meaning is not None and meaning.original is value:
                    return meaning.replacement
            return value

        return answer(module, wanted, lookup)

    def give_back(self) -> None:
        """After everything recorded was written back: names in a scope that still mean a
        replacement got it later, from another module of the scope or by a statement."""
        unwatch(self)
        known = [one for meanings in self._meanings.values() for one in meanings.values()]
        taken = inside((one.original, one.replacement) for one in known)
        for scope, meanings in self._meanings.items():
            back: dict[int, list[_Meaning]] = {}
            for one in (*meanings.values(), *(_Meaning(old, new, "", name) for name, old, new in taken)):
                back.setdefault(id(one.replacement), []).append(one)
            for module in self._loaded(scope):
                for place, held in list(scoped_places(module, back.keys())):
                    name = place.name if isinstance(place, Attribute) else None
                    place.swap(held, _originals(held, back, name))
        self._meanings.clear()

    def _inside(self, names: Mapping[str, Any], scope: tuple[str, ...]) -> bool:
        name = names.get("__name__")
        if isinstance(name, str) and any(in_package(name, prefix) for prefix in scope):
            return True
        return self._extra.covers(names)

    def _loaded(self, scope: tuple[str, ...]) -> Iterator[ModuleType]:
        if not self._extra:
            for prefix in scope:
                yield from loaded_modules(prefix)
            return
        yield from (module for module in loaded_modules() if self._inside(vars(module), scope))

    def _apply(self, module: ModuleType, meanings: dict[int, _Meaning]) -> None:
        for place, held in list(scoped_places(module, meanings.keys())):
            if isinstance(place, Attribute) and (module.__name__, place.name) in self._targets:
                continue  # the owner keeps the original
            new, patches = _translate(held, meanings)
            self._journal.write(place, held, new, ", ".join(patches))


def _translate(held: Any, meanings: dict[int, _Meaning]) -> tuple[Any, list[str]]:
    patches: list[str] = []
    for meaning in meanings.values():
        changed = exchange(held, meaning.original, meaning.replacement)
        if changed is not held:
            held, patches = changed, [*patches, meaning.patch]
    return held, patches


def _originals(held: Any, back: dict[int, list[_Meaning]], name: str | None) -> Any:
    """``held`` with originals again. One replacement may stand for several originals; then the
    name that it is bound to decides, and under another name it stays."""
    for meanings in back.values():
        for meaning in meanings:
            if len({id(one.original) for one in meanings}) == 1 or meaning.name == name:
                held = exchange(held, meaning.replacement, meaning.original)
    return held
