"""The ``module`` kind: modules that cannot be imported by themselves, and names of those that tried.

``try: from owner import name`` with ``except ImportError`` decides at import what a module has. One that was
imported before the plan runs that statement again; one that was imported since then runs its ``except`` when
the plan is taken back. A statement that a module has not finished yet is left to it.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import CodeType, FrameType, ModuleType
from typing import Any

from mt_megatron.patching.journal import Journal
from mt_megatron.patching.places import MISSING, Attribute
from mt_megatron.patching.plan import Step
from mt_megatron.patching.rebind import loaded_modules
from mt_megatron.patching.scope import Scope

_CAUGHT = ("ImportError", "ModuleNotFoundError", "Exception")


class ServedModules(Loader):
    """A finder for ``sys.meta_path`` that makes the modules which steps of the kind ``module`` name."""

    is_patch_hook = True

    def __init__(self, steps: Iterable[Step], journal: Journal, scope: Scope | None) -> None:
        self._steps = {step.module: step for step in steps}
        self._journal = journal
        self._scope = scope or Scope()

    def start(self) -> None:
        """From now on the modules can be imported, and who tried before has their names."""
        if not self._steps:
            return
        sys.meta_path.insert(0, self)
        for guard in self._guards():
            try:
                names = guard.run(guard.attempt)
            except ImportError:
                continue  # it wants something else too
            for name, (old, new) in names.items():
                self._journal.write(Attribute(guard.module, name), old, new, guard.patch)

    def give_back(self) -> None:
        """After everything recorded was written back: the modules are gone, and who imported names of them
        meanwhile has what it would have without."""
        if not self._steps:
            return
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        served = {name: module for name in self._steps if (module := sys.modules.pop(name, None)) is not None}
        for guard in self._guards():
            names = vars(guard.module)
            values = [vars(served[owner]).get(name) for owner, name, _ in guard.imported if owner in served]
            held = [names.get(alias) for owner, _, alias in guard.imported if owner in served]
            if not any(value is not None and value is own for value, own in zip(values, held, strict=True)):
                continue
            try:
                names_without = guard.run(guard.otherwise, without=guard.bound)
            except Exception:  # noqa: BLE001
                continue  # the module would not be there without
            for name, (old, new) in names_without.items():
                Attribute(guard.module, name).swap(old, new)
        for name, module in served.items():
            package, _, last = name.rpartition(".")
            if (parent := sys.modules.get(package)) is not None and vars(parent).get(last) is module:
                delattr(parent, last)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that this plan serves."""
        if name not in self._steps:
            return None
        return ModuleSpec(name, self, origin=f"mt_megatron, patch {self._steps[name].patch.id}")

    def create_module(self, spec: ModuleSpec) -> None:
        """As any module is made."""

    def exec_module(self, module: ModuleType) -> None:
        """The patch's body fills it."""
        self._steps[module.__name__].patch.body(module)

    def _guards(self) -> Iterator[_Guard]:
        packages = {step.package for step in self._steps.values()} | {"__main__"}
        for module in loaded_modules():
            inside = module.__name__.partition(".")[0] in packages or self._scope.covers(vars(module))
            if inside and module.__name__ not in self._steps:
                for node in _statements(module, self._steps):
                    guard = _Guard(module, node, self._steps)
                    if guard.imported and (node.end_lineno or 0) < _line_reached(module):
                        yield guard


class _Guard:
    """A statement ``try: from owner import name`` at the top of ``module`` that may fail."""

    def __init__(self, module: ModuleType, node: ast.Try, steps: dict[str, Step]) -> None:
        self.module = module
        attempt = [*node.body, *node.orelse]
        self.imported = [
            (statement.module or "", alias.name, alias.asname or alias.name)
            for statement in attempt
            if isinstance(statement, ast.ImportFrom) and statement.module in steps and not statement.level
            for alias in statement.names
        ]
        """Owner, name there and name here."""

        self.patch = steps[self.imported[0][0]].patch.id if self.imported else ""
        self.bound = {name for statement in attempt for one in ast.walk(statement) for name in _bound_by(one)}
        """Names that the attempt binds."""

        handler = next((one for one in node.handlers if _catches(one)), None)
        self.attempt = _compiled(attempt, module)
        self.otherwise = _compiled(handler.body if handler else [], module)

    def run(self, code: CodeType, *, without: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
        """Old and new values of the module's names that ``code`` changes, where names ``without`` are unset
        before it; nothing is changed in the module. Raises what ``code`` raises."""
        # Functions that it defines keep the namespace in which it ran: the module's own.
        names = vars(self.module)
        before = dict(names)
        for name in without:
            names.pop(name, None)
        try:
            exec(code, names)
        finally:
            changed = {
                name: (old, new)
                for name in {*before, *names} - {"__builtins__"}
                if (old := before.get(name, MISSING)) is not (new := names.get(name, MISSING))
            }
            for name, (old, new) in changed.items():
                Attribute(self.module, name).swap(new, old)
        return changed


def _line_reached(module: ModuleType) -> float:
    """The line of ``module`` at which its own statements are; infinity where they are done."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_globals is vars(module) and at.f_code.co_name == "<module>":
                return at.f_lineno or 0
            at = at.f_back
    return math.inf


def _statements(module: ModuleType, names: Iterable[str]) -> list[ast.Try]:
    try:
        with open(module.__file__ or "", encoding="utf-8") as file:
            source = file.read()
        if not any(name in source for name in names):
            return []
        return [node for node in ast.parse(source).body if isinstance(node, ast.Try)]
    except (AttributeError, OSError, SyntaxError, UnicodeDecodeError):
        return []  # made by hand, or compiled


def _bound_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in kinds)


def _compiled(statements: list[ast.stmt], module: ModuleType) -> CodeType:
    body = ast.Module(body=statements, type_ignores=[])
    return compile(body, module.__file__ or module.__name__, "exec", dont_inherit=True)
