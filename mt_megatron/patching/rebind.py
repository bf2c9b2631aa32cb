"""Every name that was bound to an original before it was patched, found by identity.

``from a import f`` copies a reference, so setting ``a.f`` alone would miss every module that was
imported earlier. A reference count says whether anybody else holds the original, which is the
whole answer for most targets; the modules of the target's package are looked through next, and what
is then still unexplained costs a pass of the collector.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

from mt_megatron.errors import PatchConflictError
from mt_megatron.patching.places import Attribute, Defaults, Item, Place, parts, underlying
from mt_megatron.patching.referrers import Held, Holder, Search, describe, safely, search

# Names that came from ``from owner import name``, read from source: the identity of such a value says
# nothing, because others hold the same object for reasons of their own.

_ATOMS = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)


def imported_places(owner: str, name: str, value: Any) -> Iterator[Attribute]:
    """Names of imported modules that are bound to ``value`` and were imported from ``owner``,
    directly or through other modules that imported it."""
    package = owner.partition(".")[0]
    # Thousands of modules hold True, or logging; one outside of the package rarely has it from there.
    ours = isinstance(value, (*_ATOMS, ModuleType))
    modules = [*loaded_modules(package), *loaded_modules("__main__")] if ours else loaded_modules()
    candidates = [
        (each, bound)
        for each in modules
        if vars(each).get("__name__") != owner and (bound := _bound(each, value))
    ]
    imports = {
        id(module): list(_imports(module, "" if _inside(module.__name__, package) else package))
        for module, _ in candidates
    }
    sources = {(owner, name)}
    found: dict[tuple[int, str], Attribute] = {}
    before = -1
    while before < len(sources):  # until nothing new is reached
        before = len(sources)
        for module, bound in candidates:
            aliases = [alias for one in imports[id(module)] for alias in _bound_by(sources, *one)]
            for alias in bound.intersection(aliases):
                sources.add((module.__name__, alias))
                found[id(module), alias] = Attribute(module, alias)
    yield from found.values()


def _bound(module: ModuleType, value: Any) -> set[str]:
    names = vars(module)
    if {id(value)}.isdisjoint(map(id, names.values())):
        return set()
    return {name for name, one in list(names.items()) if one is value}


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".") or module == "__main__"


def _bound_by(sources: set[tuple[str, str]], source: str, imported: str, alias: str) -> list[str]:
    if imported == "*":
        return [name for module, name in sources if module == source]
    return [alias] if (source, imported) in sources else []


# Parsing takes a hundred times as long, and what this finds wrongly in a string binds no name. It begins
# with a word, which is searched for in C.
_STATEMENT = re.compile(r"from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^)]*\)|(?:[^\n#;\\]|\\\n)*)")
_COMMENT = re.compile(r"#[^\n]*")


def _imports(module: ModuleType, prefix: str) -> Iterator[tuple[str, str, str]]:
    """``(module, name, alias)`` of every ``from`` import in a source that mentions ``prefix``."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not path.endswith(".py"):
        return
    package = str(getattr(module, "__package__", "") or "").split(".")
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError:
        return
    for source, names in _statements(path, changed, prefix):
        level = len(source) - len(source.lstrip("."))
        base = package[: len(package) - level + 1] if level else []
        full = ".".join([*base, *([source[level:]] if source[level:] else [])])
        yield from ((full, name, alias) for name, alias in names)


@lru_cache(maxsize=256)
def _statements(path: str, changed: int, prefix: str) -> list[tuple[str, list[tuple[str, str]]]]:
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    found: list[tuple[str, list[tuple[str, str]]]] = []
    if prefix not in text:
        return found
    for source, listed in _from_imports(text):
        plain = _COMMENT.sub("", listed).replace("\\\n", " ").strip("() \t\n")
        pairs = [part.split() for part in plain.split(",")]
        found.append((source, [(words[0], words[-1]) for words in pairs if words]))
    return found


def _from_imports(text: str) -> Iterator[tuple[str, str]]:
    at = text.find("from")
    while at >= 0:
        before = text[text.rfind("\n", 0, at) + 1 : at].rstrip(" \t")
        statement = _STATEMENT.match(text, at) if not before or before.endswith(";") else None
        if statement is not None:
            yield statement[1], statement[2]
        at = text.find("from", at + 4 if statement is None else statement.end())


# Holders of a value, by its identity.

Reach = Literal["everywhere", "package", "imports"]
"""How far the identity of a value says that a holder means the target that it is found at.

* ``everywhere``: it was made for this target; whoever holds it means the target.
* ``package``: a callable from elsewhere (``jit_fuser = torch.compile``); only names in modules of
  the target's package mean the target by it.
* ``imports``: an object that others hold for reasons of their own, such as ``True``; only names
  bound by ``from owner import name`` mean the target.
"""


def reach(value: Any, package: str) -> Reach:
    """The reach of an original that is found at a target in ``package``."""
    if isinstance(value, (list, dict, set, staticmethod, classmethod, property)):
        return "everywhere"
    home = safely(value, "__module__")
    if isinstance(home, str) and in_package(home, package) and not isinstance(value, tuple):
        return "everywhere"
    return "package" if callable(value) else "imports"


def in_package(module: str, prefix: str) -> bool:
    """Whether ``module`` is ``prefix`` or lies below it."""
    return module == prefix or module.startswith(prefix + ".")


@dataclass(frozen=True)
class Original:
    """A value about to be replaced, and the place that its patch sets."""

    held: Held
    target: Attribute
    module: str
    reach: Reach
    descriptor: Held | None = None
    """The staticmethod, classmethod or property around ``held``, when there is one."""

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def holders(originals: Sequence[Original], ignored: Collection[int] = ()) -> Search:
    """Every place other than the targets themselves that holds one of the originals.

    ``ignored`` are ids of objects that may go on holding an original. Raises PatchConflictError
    when two targets are one object, so that its other holders could mean either.
    """
    found = Search()
    everywhere: list[Original] = []
    claimed: dict[int, Original] = {}
    packages = {package: loaded_modules(package) for package in {one.package for one in originals}}
    for original in originals:
        other = claimed.setdefault(id(original.held.value), original)
        if other is not original and original.reach != "imports":
            raise PatchConflictError(
                f"{other.target.describe()} and {original.target.describe()} are one object, so what its "
                f"other holders mean cannot be told: patch one of them"
            )
        if original.reach == "everywhere":
            everywhere.append(original)
        elif original.reach == "package":
            found.holders += _named(original, packages[original.package])
        elif isinstance(original.target.owner, ModuleType):
            value = original.held.value
            places = imported_places(original.module, original.target.name, value)
            found.holders += [Holder(place, value) for place in places]
    # Counted before anything found is kept, because what is kept is a reference too.
    outside = [(_outside(one), one) for one in everywhere]
    ids = {id(one.held.value) for count, one in outside if count > 0}
    if not ids:
        return found
    targets = {one.target.key for one in originals}
    concerned = {one.package for count, one in outside if count > 0}
    modules = [module for package in concerned for module in packages[package]]
    named = (pair for module in _once(modules) for pair in _names(module, ids))
    quick = [Holder(place, value) for place, value in named if place.key not in targets]
    found.holders += quick
    counted = Counter(id(holder.held) for holder in quick)
    open_ones = [pair for pair in outside if pair[0] > counted[id(pair[1].held.value)]]
    if open_ones:
        _search(found, open_ones, originals, ignored)
    return found


def _search(
    found: Search,
    open_ones: list[tuple[int, Original]],
    originals: Sequence[Original],
    ignored: Collection[int],
) -> None:
    held = [one.held for _, one in open_ones]
    wrappers = [one.descriptor.value for one in originals if one.descriptor]
    own = [wrappers, *wrappers, *map(_attributes, wrappers), *found.holders]
    ours = {*ignored, *map(id, own), id(own)}
    known = {holder.place.key for holder in found.holders} | {one.target.key for one in originals}
    deep = search(held, ours)
    if deep.stuck:
        # What only garbage holds is no holder.
        gc.collect()
        deep = search(held, ours)
    found.holders += [holder for holder in deep.holders if holder.place.key not in known]
    found.stuck += deep.stuck
    found.passing += deep.passing
    for count, one in open_ones:
        in_target = one.descriptor is None and one.target.state(one.held.value) == "ours"
        unseen = count + in_target - deep.tally[id(one.held.value)]
        if unseen > 0:
            what = describe(one.held.value)
            found.passing.append(f"a call in progress or C code ({unseen} reference(s) to {what})")


def _outside(original: Original) -> int:
    """References to the original from holders that are neither the target nor the engine."""
    count = original.held.references() - original.held.intrinsic()
    value = original.held.value
    if original.descriptor is None:
        return count - (1 if original.target.read() is value else 0)
    wrapper = original.descriptor.value
    inside = [*gc.get_referents(wrapper), *_attributes(wrapper).values()]
    return count - sum(one is value for one in inside)


def _attributes(descriptor: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(descriptor, "__dict__", {})
    return found


def loaded_modules(prefix: str | None = None) -> list[ModuleType]:
    """Imported modules, those of one package when ``prefix`` is given."""
    # A copy in one piece: ``list(items())`` makes pair after pair; garbage collection in between lets
    # another thread import.
    modules = sys.modules.copy()
    if prefix is None:
        return [module for module in modules.values() if isinstance(module, ModuleType)]
    below = f"{prefix}."
    return [
        module
        for name, module in modules.items()
        if (name.startswith(below) or name == prefix) and isinstance(module, ModuleType)
    ]


def _once(modules: Iterable[ModuleType]) -> Iterable[ModuleType]:
    """Each module once: some are in ``sys.modules`` under several names."""
    return {id(module): module for module in modules}.values()


def _names(owner: ModuleType | type, ids: Set[int]) -> Iterator[tuple[Attribute, Any]]:
    names = vars(owner)
    # One pass in C for the common case that there is nothing here; it also cannot be disturbed
    # by another thread that is importing.
    if ids.isdisjoint(map(id, names.values())):
        return
    for name, value in list(names.items()):
        if id(value) in ids:
            yield Attribute(owner, name), value


_DESCRIPTORS = (staticmethod, classmethod, property)


def _classes(module: ModuleType) -> Collection[type]:
    values = list(vars(module).values())
    # Not isinstance, which also reads __class__: objects that warn of their deprecation then do so.
    own = (one for one in values if issubclass(type(one), type) and one.__module__ == module.__name__)
    return {id(one): one for one in own}.values()  # once each, whatever a metaclass says of equality


def _named(original: Original, modules: Iterable[ModuleType]) -> Iterator[Holder]:
    value = original.held.value
    for module in modules:
        for place, _ in _names(module, {id(value)}):
            if place.key != original.target.key:
                yield Holder(place, value)


def function_names(wanted: Callable[[FunctionType], bool], package: str) -> Iterator[Attribute]:
    """Names of imported modules, and of classes in modules of ``package``, that are bound to a function, or
    to a descriptor of one, which is ``wanted``."""
    for module in _once(loaded_modules()):
        inside = in_package(str(vars(module).get("__name__")), package)
        owners: list[ModuleType | type] = [module, *(_classes(module) if inside else ())]
        for owner in owners:
            for name, value in list(vars(owner).items()):
                # By the type itself: other objects may do anything when they are asked.
                function = underlying(value) if type(value) in _DESCRIPTORS else value
                if type(function) is FunctionType and wanted(function):
                    yield Attribute(owner, name)


def scoped_places(module: ModuleType, ids: Set[int]) -> Iterator[tuple[Place, Any]]:
    """Names of one module and of its classes, and default arguments of its functions, that are
    bound to one of the objects with these ids, or to a tuple or descriptor of one; the second
    value is what is there now."""
    owners: list[ModuleType | type] = [module, *_classes(module)]
    for owner in owners:
        yield from _names(owner, ids)
        for name, value in list(vars(owner).items()):
            if any(id(one) in ids for one in parts(value)):
                yield Attribute(owner, name), value
            for function in _functions(value, module):
                yield from _defaults(function, ids)


def _functions(value: Any, module: ModuleType) -> Iterator[FunctionType]:
    for one in (value, *parts(value)):
        if isinstance(one, FunctionType) and one.__globals__ is vars(module):
            yield one


def _defaults(function: FunctionType, ids: Set[int]) -> Iterator[tuple[Place, Any]]:
    defaults = function.__defaults__
    if defaults and any(id(one) in ids for one in defaults):
        yield Defaults(function), defaults
    keywords = function.__kwdefaults__
    if keywords:
        for name, value in list(keywords.items()):
            if id(value) in ids:
                yield Item(keywords, name, f"the keyword defaults of {function.__qualname__}"), value
