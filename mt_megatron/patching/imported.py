"""Which names came from ``from owner import name``, read from source: for values whose identity says
nothing, because others hold the same object for reasons of their own."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .digest import parse_file
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
        for bound in [{known for known, one in list(vars(module).items()) if one is value}]
        if bound
    ]
    imports = {id(module): list(_imports(module)) for module, _ in candidates}
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


def _concerns(module: str, package: str, value: Any) -> bool:
    # Thousands of modules hold True; one outside of the package rarely has it from there.
    inside = module == package or module.startswith(package + ".") or module == "__main__"
    return inside or not isinstance(value, _ATOMS)


def _bound_by(sources: set[tuple[str, str]], source: str, imported: str, alias: str) -> list[str]:
    if imported == "*":
        return [name for module, name in sources if module == source]
    return [alias] if (source, imported) in sources else []


def _imports(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """``(module, name, alias)`` of every ``from`` import in the module's source."""
    path = getattr(module, "__file__", None)
    if not path or not path.endswith(".py") or not Path(path).exists():
        return
    package = str(getattr(module, "__package__", "") or "").split(".")
    for node in ast.walk(parse_file(Path(path))[1]):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((source, one.name, one.asname or one.name) for one in node.names)
