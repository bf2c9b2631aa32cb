"""Which names came from ``from owner import name``, read from source: for values whose identity says
nothing, because others hold the same object for reasons of their own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .places import Attribute

_ATOMS = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)


def imported_places(owner: str, name: str, value: Any) -> Iterator[Attribute]:
    """Names of imported modules that are bound to ``value`` and were imported from ``owner``,
    directly or through other modules that imported it."""
    package = owner.partition(".")[0]
    candidates = [
        (module, bound)
        for key, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and key != owner and _concerns(key, package, value)
        for bound in [_bound(module, value)]
        if bound
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


def _concerns(module: str, package: str, value: Any) -> bool:
    # Thousands of modules hold True, or logging; one outside of the package rarely has it from there.
    return _inside(module, package) or not isinstance(value, (*_ATOMS, ModuleType))


def _bound_by(sources: set[tuple[str, str]], source: str, imported: str, alias: str) -> list[str]:
    if imported == "*":
        return [name for module, name in sources if module == source]
    return [alias] if (source, imported) in sources else []


# Parsing takes a hundred times as long, and what this finds wrongly in a string binds no name.
_STATEMENT = re.compile(
    r"(?:^|;)[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^)]*\)|(?:[^\n#;\\]|\\\n)*)", re.MULTILINE
)
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
    for source, listed in _STATEMENT.findall(text):
        plain = _COMMENT.sub("", listed).replace("\\\n", " ").strip("() \t\n")
        pairs = [part.split() for part in plain.split(",")]
        found.append((source, [(words[0], words[-1]) for words in pairs if words]))
    return found
