"""Carry a checked plan out, now and as its modules get imported, and take it back."""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakSet

from mt_megatron.errors import PatchConflictError, PatchError, PatchImportError, PatchTargetError
from mt_megatron.patching.dataclass_fields import field_writes
from mt_megatron.patching.hooks import ImportHook
from mt_megatron.patching.journal import Journal
from mt_megatron.patching.places import (
    MISSING,
    Arguments,
    Attribute,
    Code,
    Element,
    Key,
    exchange,
    underlying,
)
from mt_megatron.patching.plan import Plan, Step, check_again
from mt_megatron.patching.prior_changes import PriorChange, prior_change
from mt_megatron.patching.rebind import Original, Reach, holders, reach
from mt_megatron.patching.referrers import Held, Search
from mt_megatron.patching.report import PatchReport, State, make_report
from mt_megatron.patching.scope import Scope
from mt_megatron.patching.scoped import ScopedRebinds
from mt_megatron.patching.served import ServedModules
from mt_megatron.patching.spec import Patch

# Kinds: the value that a patch puts at its target, made from the value that is there.

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


# Exchange of a target's value in everything that holds it: forward when patching, back when undoing.


@dataclass(frozen=True)
class Given:
    """``new`` was put at ``place`` instead of ``old`` (``MISSING``: of nothing); who imports the
    name from then on gets ``new``."""

    place: Attribute
    old: Any
    new: Held
    step: Step
    unique: bool
    """Whether nobody else had ``new`` when it was put there."""


def originals_of(steps: Iterable[Step], places: dict[str, Attribute]) -> list[Original]:
    """What is about to give way, once per target. Only ``Held`` refers to it."""
    found: dict[str, list[Original]] = {}
    for step in steps:
        target, place = step.patch.target, places[step.patch.target]
        if step.patch.kind in ("constant", "add", "fields") or target in found or place.read() is MISSING:
            continue
        raw = Held(place.read())
        found[target] = _pair(raw, place, step, reach(raw.value, step.package))
    return [original for pair in found.values() for original in pair]


def _pair(raw: Held, place: Attribute, step: Step, how: Reach) -> list[Original]:
    """The value itself and, in a descriptor, the function that others may hold without it."""
    pair = [Original(raw, place, step.module, how)]
    if underlying(raw.value) is not raw.value:
        pair.append(Original(Held(underlying(raw.value)), place, step.module, how, raw))
    return pair


def private_ids(body: Any) -> list[int]:
    """Ids of what a body keeps for itself: it may hold the original, and has to go on doing so."""
    closure = getattr(body, "__closure__", None) or ()
    keywords = getattr(body, "__kwdefaults__", None)
    kept = [*closure, closure, getattr(body, "__defaults__", None), keywords, body]
    if isinstance(body, type):
        kept += [body.__mro__, body.__bases__, *body.__mro__]
    return [id(one) for one in kept if one is not None]


def write_holders(
    journal: Journal, originals: Iterable[Original], found: Search, blame: dict[Any, str]
) -> None:
    """Let every holder that was found have what is at the originals' targets now."""
    moves = [
        (original.held.value, new, blame[original.target.key])
        for original in originals
        for new in [_successor(original)]
        if new is not MISSING
    ]
    _write(journal, found, moves)


def _successor(original: Original, value: Any = MISSING) -> Any:
    new = original.target.read() if value is MISSING else value
    if original.descriptor is None:
        return new
    return underlying(new) if type(new) is type(original.descriptor.value) else MISSING


def _write(journal: Journal, found: Search, moves: Sequence[tuple[Any, Any, str]]) -> None:
    seen: set[Any] = set()
    for holder in found.holders:
        place = holder.place
        several = isinstance(place, (Element, Key))
        key = (*place.key, id(holder.held)) if several else place.key
        if key in seen:
            continue
        seen.add(key)
        held = place.read() if isinstance(place, Arguments) else holder.held
        changed, patches = held, list[str]()
        for old, new, patch_id in moves:
            result = exchange(changed, old, new)
            if result is not changed:
                changed, patches = result, [*patches, patch_id]
        if place.state(held) == "ours":
            journal.write(place, held, changed, ", ".join(dict.fromkeys(patches)))


def give_back(given: Iterable[Given]) -> Search:
    """After everything recorded was written back: whoever bound a patched value since then, by
    ``from owner import name`` for example, gets the original. Returns what could not be given."""
    pairs = [
        (original, one)
        for one in given
        if one.old is not MISSING
        for original in _pair(one.new, one.place, one.step, "everywhere" if one.unique else "imports")
    ]
    found = holders([original for original, _ in pairs])
    moves = [
        (original.held.value, old, one.step.patch.id)
        for original, one in pairs
        for old in [_successor(original, one.old)]
        if old is not MISSING
    ]
    _write(Journal(), found, moves)
    return found


# The plan in force.


_plans: WeakSet[AppliedPlan] = WeakSet()
"""Every plan of this process: a value that one of them put at a target is nobody else's change."""


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
        modules = [step for step in plan.steps if step.patch.kind == "module"]
        self._served = ServedModules(modules, self._journal, scope)
        self._done.update(step.patch.id for step in modules)
        self._owned: dict[str, list[Step]] = defaultdict(list)
        for step in plan.steps:
            if step.patch.kind not in ("rebind", "module"):
                self._owned[step.module].append(step)
        self._hook = ImportHook(self._watches, self._imported)
        _plans.add(self)

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
        self._served.start()

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
        self._served.give_back()
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
            self._apply(self._checked(module))
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

    def _checked(self, module: ModuleType) -> list[Step]:
        """The steps of ``module``, each checked against the file that it was loaded from."""
        steps = self._owned.get(module.__name__, [])
        unchecked = [step for step in steps if not step.is_checked_for(module)]
        if unchecked:
            self.plan = check_again(self.plan, unchecked)
            mine = {step.patch.id for step in steps}
            self._owned[module.__name__] = [step for step in self.plan.steps if step.patch.id in mine]
        return [*self._owned.get(module.__name__, ())]

    def _apply(self, steps: Sequence[Step]) -> None:
        setting = [step for step in steps if step.patch.kind != "rebind"]
        places = {step.patch.target: _target(step) for step in setting}
        self._meet_prior_changes(setting, places)
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

    def _meet_prior_changes(self, steps: Sequence[Step], places: Mapping[str, Attribute]) -> None:
        found: dict[str, PriorChange] = {}
        by_target: dict[str, list[Patch]] = defaultdict(list)
        for step in steps:
            by_target[step.patch.target].append(step.patch)
            place = places[step.patch.target]
            if step.patch.target in found or any(plan._gave(place) for plan in list(_plans)):
                continue
            change = prior_change(step, place)
            if change is not None:
                found[step.patch.target] = change
        texts, refused = [], []
        for target, change in found.items():
            patches = by_target[target]
            names = ", ".join(f"{each.id} ({each.kind})" for each in patches)
            texts.append(f"{target} {change.text} (patch {names})")
            # Wraps of a function that nobody else holds go around the change.
            if change.is_split or any(each.kind != "wrap" for each in patches):
                refused.append(texts[-1])
        if refused and self.plan.strict:
            raise PatchConflictError(
                "other code changed targets before they were patched: "
                + "; ".join(refused)
                + ". Call patch() before that change or undo it; strict=False patches what is there now"
            )
        self._notes += texts

    def _gave(self, place: Attribute) -> bool:
        return (place.key, id(place.read())) in self._given

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
        # A reload keeps what the module's dict holds: what is there may be what this patch added before.
        is_ours = (place.key, id(present)) in self._given
        if patch.kind == "add" and present is not MISSING and not is_ours:
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
