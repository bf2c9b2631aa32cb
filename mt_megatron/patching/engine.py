"""Carry a checked plan out, now and as its modules get imported, and take it back."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ..errors import PatchConflictError, PatchError, PatchImportError, PatchTargetError
from .dataclass_fields import field_writes
from .exchanging import Given, give_back, originals_of, private_ids, write_holders
from .hooks import ImportHook
from .journal import Journal
from .kinds import coded_function, describe_value, new_value, with_constants
from .places import MISSING, Attribute, Code
from .plan import Plan, Step
from .rebind import Original, holders
from .referrers import Held, Search
from .report import PatchReport, State, make_report
from .scope import Scope
from .scoped import ScopedRebinds


def commit(plan: Plan, scope: Scope | None = None) -> AppliedPlan:
    """Apply ``plan``. Imports nothing: what is imported already is patched and rebound now, the
    rest when it is imported. Rebinds reach ``scope`` too, beside their own.

    Raises PatchError (or what a patch's body raised, as its cause) after undoing everything.
    """
    applied = AppliedPlan(plan, scope)
    try:
        applied.start()
    except BaseException:
        applied.roll_back()
        raise
    return applied


class AppliedPlan:
    """A plan in force, until ``revert`` or until a late patch fails."""

    def __init__(self, plan: Plan, scope: Scope | None = None) -> None:
        self.plan = plan
        self.failure: BaseException | None = None
        self._journal = Journal()
        self._given: dict[Any, Given] = {}
        """By place and patched value, so that threads that import at once do not collide."""
        self._done: set[str] = set()
        self._unrebindable: list[str] = []
        self._notes: list[str] = []
        rebinds = (step for step in plan.steps if step.patch.kind == "rebind")
        self._scoped = ScopedRebinds(rebinds, self._journal, scope)
        self._owned: dict[str, list[Step]] = defaultdict(list)
        for step in plan.steps:
            if step.patch.kind != "rebind":
                self._owned[step.module].append(step)
        self._hook = ImportHook(self._watches, self._imported)

    @property
    def active(self) -> bool:
        return not self._journal.closed

    def report(self) -> PatchReport:
        """What is applied and what waits, at this moment."""
        waiting = {step.patch.id for step in self._scoped.waiting}
        states: dict[str, tuple[State, str]] = {}
        for step in self.plan.steps:
            if not self.active:
                states[step.patch.id] = ("undone", str(self.failure or ""))
            elif step.patch.id in self._done or (
                step.patch.kind == "rebind" and step.patch.id not in waiting
            ):
                states[step.patch.id] = ("applied", "")
            else:
                states[step.patch.id] = ("pending", f"module {step.module} is not imported yet")
        rebound: dict[str, list[str]] = defaultdict(list)
        targets = {step.patch.id: (step.module, step.qualname) for step in self.plan.steps}
        for entry in self._journal:
            for patch_id in entry.patch.split(", "):
                if not _is_target(entry.place, targets[patch_id]):
                    rebound[patch_id].append(entry.place.describe())
        return make_report(self.plan, states, rebound, tuple(self._notes), tuple(self._unrebindable))

    def start(self) -> None:
        """Apply what can be applied and wait for the rest."""
        if self._owned or self._scoped.prefixes:
            # First, so that no module slips in between.
            self._hook.install()
        self._scoped.start()
        now = {name for name in self._owned if self._loaded(name)}
        self._apply([step for step in self.plan.steps if step.module in now or step.patch.kind == "rebind"])
        self._scoped.apply()

    def revert(self) -> list[str]:
        """Put every value back. Returns descriptions of holders that keep a patched value because
        they got it after ``commit`` and cannot be written.

        Raises PatchError, changing nothing, when somebody else has written over one of our values.
        """
        if self._journal.closed:
            return []
        self._journal.revert()
        return self._withdraw()

    def roll_back(self) -> list[str]:
        """Put back what is still ours, whatever happens; describes the rest."""
        return self._journal.revert(force=True) + self._withdraw()

    def _withdraw(self) -> list[str]:
        self._hook.remove()
        self._scoped.give_back()
        given, self._given = self._given, {}
        return [holder for holder, _ in give_back(list(given.values())).stuck]

    def _watches(self, module: str) -> bool:
        return self.active and (module in self._owned or self._scoped.covers(module))

    def _loaded(self, name: str) -> bool:
        """Whether the module is to be patched now; False leaves it to the hook."""
        if name not in sys.modules or name in self._hook.hooked:
            return False
        if _initializing(name):
            # Another thread began before the hook was there. This waits for it.
            importlib.import_module(name)
            if _initializing(name):
                raise PatchError(
                    f"module {name!r} is being imported by the very code that calls patch(): "
                    f"call patch() before that import, or after it"
                )
        return True

    def _imported(self, module: ModuleType) -> None:
        if not self.active:
            return
        try:
            self._journal.forget_stale(module)
            self._apply([*self._owned.get(module.__name__, ())])
            found_new = self._scoped.resolve(self._ready, self._meaning)
            self._scoped.apply(None if found_new else [module])
        except BaseException as error:
            self.failure = error
            left = self.roll_back()
            if not isinstance(error, Exception):
                raise
            raise PatchImportError(
                f"importing {module.__name__} failed because a patch of it did, and all patches were undone"
                f"{' except ' + '; '.join(left) if left else ''}: {error}",
                name=module.__name__,
            ) from error

    def _apply(self, steps: Sequence[Step]) -> None:
        setting = [step for step in steps if step.patch.kind != "rebind"]
        places = {step.patch.target: _target(step) for step in setting}
        originals = originals_of(setting, places)
        found = holders(originals, {one for step in setting for one in private_ids(step.patch.body)})
        self._note(found, setting, originals)
        for step in steps:
            if step.patch.kind != "rebind":
                with _naming(step):
                    self._set(step, places[step.patch.target])
            elif self._ready(step) and self._scoped.claim(step):
                self._scoped.take(step, *self._meaning(step))
        blame: dict[Any, str] = {}
        for step in setting:
            key = places[step.patch.target].key
            blame[key] = f"{blame[key]}, {step.patch.id}" if key in blame else step.patch.id
        write_holders(self._journal, originals, found, blame)
        self._done.update(step.patch.id for step in setting)

    def _note(self, found: Search, steps: Sequence[Step], originals: Sequence[Original]) -> None:
        keys = {id(one.held.value): one.target.key for one in originals}
        stuck: list[str] = []
        for holder, root in found.stuck:
            mine = [step.patch for step in steps if _target(step).key == keys[root]]
            stuck.append(f"{mine[0].target} (patch {', '.join(one.id for one in mine)}) by {holder}")
        if stuck and self.plan.strict:
            raise PatchError(
                "originals are held by what cannot be rebound: "
                + "; ".join(stuck)
                + ". Call patch() before that holder is made, or use strict=False to leave it as it is"
            )
        self._unrebindable += stuck
        self._notes += [f"{text} goes on with the original" for text in found.passing]

    def _set(self, step: Step, place: Attribute) -> None:
        patch, present = step.patch, place.read()
        if patch.kind == "add" and present is not MISSING:
            raise PatchConflictError(
                f"patch {patch.id} adds {patch.target}, but it exists: {describe_value(present)}"
            )
        raw = _inherited(place, patch.target) if present is MISSING and patch.kind != "add" else present
        if patch.kind == "constant":
            function = coded_function(raw, patch.target)
            changed = with_constants(function.__code__, patch.body, patch.target)
            self._journal.write(Code(function), function.__code__, changed, patch.id)
            return
        if patch.kind == "fields":
            for where, before, after in field_writes(raw, patch.body):
                self._journal.write(where, before, after, patch.id)
            return
        new = Held(new_value(patch, raw, step.module, step.qualname))
        unique = new.references() == 0
        if new.value is not raw:
            old = MISSING if patch.kind == "add" else raw
            wrapped = self._given.pop((place.key, id(present)), None)  # a value of our own
            given = Given(place, wrapped.old if wrapped else old, new, step, unique)
            self._given[place.key, id(new.value)] = given
        self._journal.write(place, present, new.value, patch.id)

    def _ready(self, step: Step) -> bool:
        return step.module in sys.modules and not _initializing(step.module)

    def _meaning(self, step: Step) -> tuple[Any, Any]:
        value: Any = sys.modules[step.module]
        with _naming(step):
            for name in step.qualname.split(".") if step.qualname else ():
                value = getattr(value, name)
            return value, step.patch.body(value)


@contextmanager
def _naming(step: Step) -> Iterator[None]:
    """Every failure says which patch it was."""
    try:
        yield
    except PatchError:
        raise
    except Exception as error:
        raise PatchError(
            f"patch {step.patch.id} of {step.patch.target} failed: {type(error).__name__}: {error}"
        ) from error


def _initializing(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _target(step: Step) -> Attribute:
    owner: Any = sys.modules[step.module]
    *outer, name = step.qualname.split(".")
    for part in outer:
        owner = getattr(owner, part, MISSING)
    if not isinstance(owner, (type, ModuleType)):
        raise PatchTargetError(
            f"patch {step.patch.id}: {step.patch.target} has no class around it, but {describe_value(owner)}"
        )
    return Attribute(owner, name)


def _inherited(place: Attribute, target: str) -> Any:
    if isinstance(place.owner, type):
        found = inspect.getattr_static(place.owner, place.name, MISSING)
    else:
        found = getattr(place.owner, place.name, MISSING)
    if found is MISSING:
        raise PatchTargetError(f"{target} does not exist here: {place.describe()} is missing")
    return found


def _is_target(place: Any, target: tuple[str, str]) -> bool:
    if isinstance(place, Code):
        return True
    if not isinstance(place, Attribute):
        return False
    module, qualname = target
    if isinstance(place.owner, ModuleType):
        return (place.owner.__name__, place.name) == target
    return (place.owner.__module__, f"{place.owner.__qualname__}.{place.name}") == (module, qualname)
