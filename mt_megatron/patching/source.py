"""Find a target's source file and the lines that define it, without importing anything."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Literal

from ..errors import PatchTargetError

DefinitionKind = Literal["module", "function", "class", "assignment", "import"]
Statement = ast.stmt


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a function as its source declares it."""

    name: str
    kind: Literal["positional", "normal", "args", "keyword", "kwargs"]
    required: bool


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Where and how a qualified name is bound in a source file."""

    kind: DefinitionKind
    """Of the last binding, which is the one that an import leaves behind (of a property, the
    getter)."""

    segments: tuple[tuple[int, int], ...]
    """1-based, inclusive line ranges in source order: every binding of the name, with the tests
    of the ``if`` statements around it."""

    parameters: tuple[Parameter, ...] | None
    """Of a function (of its last definition); None for everything else."""

    decorators: tuple[str, ...] = ()
    """Of the last definition, as written."""

    imported_from: str | None = None
    """``module:name`` (or ``module:``) for an import."""


def parse_target(target: str) -> tuple[str, str]:
    """Split ``module:qualname`` into its two halves; raises PatchTargetError on any other shape."""
    module, colon, qualname = target.partition(":")
    parts = module.split(".") + (qualname.split(".") if qualname else [])
    if not colon or not all(part.isidentifier() for part in parts):
        raise PatchTargetError(
            f"{target!r} is not a patch target: expected 'package.module:Name' or "
            f"'package.module:Class.method' (and 'package.module:' for the module itself)"
        )
    return module, qualname


def locate(module: str) -> Path:
    """The source file of ``module``: of the imported module if there is one, else of what an
    import would find now. No module is imported and no package's code runs."""
    origin = _origin(module)
    if origin is None or not origin.endswith(".py"):
        raise PatchTargetError(f"module {module!r} has no Python source file (found {origin or 'none'})")
    return Path(origin)


def exists(module: str) -> bool:
    """Whether ``module`` could be imported, whatever it is written in."""
    try:
        _origin(module)
    except PatchTargetError:
        return False
    return True


def _origin(module: str) -> str | None:
    search: Sequence[str] | None = None
    origin: str | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        if name != part and search is None:
            raise PatchTargetError(f"no module {module!r}: {name.rpartition('.')[0]!r} is not a package")
        loaded = sys.modules.get(name)
        if loaded is not None:
            origin = getattr(loaded, "__file__", None)
            paths = getattr(loaded, "__path__", None)
            search = None if paths is None else list(paths)
            continue
        spec = _find(part, name, search)
        if spec is None:
            where = "sys.path" if name == part else f"the path of {name.rpartition('.')[0]!r}"
            raise PatchTargetError(f"no module {name!r} on {where}: is it installed here?")
        origin = spec.origin if spec.has_location else None
        paths = spec.submodule_search_locations
        search = None if paths is None else list(paths)
    return origin


def _find(part: str, name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    # Asking for the last part alone keeps a nested namespace package from looking up its parent
    # in sys.modules, where it need not be.
    spec = PathFinder.find_spec(part, search)
    if spec is not None:
        return spec
    for finder in sys.meta_path:  # such as the finders of editable installations
        if isinstance(finder, type) or getattr(finder, "is_patch_hook", False):
            continue
        spec = finder.find_spec(name, search, None)
        if spec is not None:
            return spec
    return None


def define(tree: ast.Module, qualname: str) -> Definition | None:
    """How ``qualname`` (dotted, through classes) is bound in ``tree``; None if it is not."""
    found, name = _bindings_of(tree, qualname), qualname.rpartition(".")[2]
    if not found:
        return None
    segments: list[tuple[int, int]] = []
    for binding in found:
        for segment in binding.segments:
            if segment not in segments:
                segments.append(segment)
    node = found[-1].node
    accessors = (f"{name}.setter", f"{name}.deleter")
    if any(ast.unparse(one) in accessors for one in getattr(node, "decorator_list", ())):
        node = found[0].node  # what reads a property stands for it
    return _describe(node, name, tuple(sorted(segments)))


def decorators_of(tree: ast.Module, qualname: str) -> list[tuple[str, ...]] | None:
    """Decorators, as written, of every ``def`` that binds ``qualname``; None where an import, an assignment
    or a class binds it too, so that it may be another object than such a function."""
    found: list[tuple[str, ...]] = []
    name = qualname.rpartition(".")[2]
    for binding in _bindings_of(tree, qualname):
        node = binding.node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(tuple(ast.unparse(decorator) for decorator in node.decorator_list))
        elif isinstance(node, (ast.ClassDef, ast.Import, ast.ImportFrom)) or _stores(node, name):
            return None
    return found


def _stores(node: Statement, name: str) -> bool:
    # ``name.attribute = value`` mentions the name and leaves it bound to what it was.
    return any(
        isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store)
        for each in ast.walk(node)
    )


def _bindings_of(tree: ast.Module, qualname: str) -> list[_Binding]:
    bodies: list[list[Statement]] = [tree.body]
    *outer, name = qualname.split(".")
    for part in outer:
        bodies = [
            binding.node.body
            for body in bodies
            for binding in _bindings(body, part)
            if isinstance(binding.node, ast.ClassDef)
        ]
    return [binding for body in bodies for binding in _bindings(body, name)]


@dataclass(frozen=True)
class _Binding:
    node: Statement
    segments: tuple[tuple[int, int], ...]


def _bindings(body: list[Statement], name: str) -> Iterator[_Binding]:
    for statement in body:
        yield from _bindings_in(statement, name, ())


def _bindings_in(statement: Statement, name: str, around: tuple[Statement, ...]) -> Iterator[_Binding]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if statement.name == name:
            tests = tuple(
                (outer.lineno, outer.test.end_lineno or outer.lineno)
                for outer in around
                if isinstance(outer, (ast.If, ast.While))
            )
            yield _Binding(statement, (*tests, _lines(statement)))
        return
    if name in _bound_names(statement):
        # A conditional assignment or import means what the whole statement around it says.
        yield _Binding(statement, (_lines(around[0] if around else statement),))
    for nested in _nested(statement):
        yield from _bindings_in(nested, name, (*around, statement))


def _lines(statement: Statement) -> tuple[int, int]:
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    return first, statement.end_lineno or statement.lineno


def _nested(statement: Statement) -> Iterator[Statement]:
    for field in ("body", "orelse", "finalbody"):
        yield from getattr(statement, field, [])
    for handler in getattr(statement, "handlers", []):
        yield from handler.body
    for case in getattr(statement, "cases", []):
        yield from case.body


def _bound_names(statement: Statement) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign, ast.For)):
        targets = [statement.target]
    elif isinstance(statement, ast.With):
        targets = [item.optional_vars for item in statement.items if item.optional_vars]
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def _describe(node: Statement, name: str, segments: tuple[tuple[int, int], ...]) -> Definition:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        decorators = tuple(ast.unparse(decorator) for decorator in node.decorator_list)
        return Definition(
            kind="function", segments=segments, parameters=_parameters(node.args), decorators=decorators
        )
    if isinstance(node, ast.ClassDef):
        decorators = tuple(ast.unparse(decorator) for decorator in node.decorator_list)
        return Definition(kind="class", segments=segments, parameters=None, decorators=decorators)
    if isinstance(node, ast.ImportFrom):
        alias = next(a for a in node.names if (a.asname or a.name) == name)
        source = "." * node.level + (node.module or "")
        return Definition(
            kind="import", segments=segments, parameters=None, imported_from=f"{source}:{alias.name}"
        )
    if isinstance(node, ast.Import):
        module = next(
            (a.name if a.asname else name)
            for a in node.names
            if (a.asname or a.name.partition(".")[0]) == name
        )
        return Definition(kind="import", segments=segments, parameters=None, imported_from=f"{module}:")
    return Definition(kind="assignment", segments=segments, parameters=None)


def _parameters(arguments: ast.arguments) -> tuple[Parameter, ...]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    found = [
        Parameter(
            name=argument.arg,
            kind="positional" if index < len(arguments.posonlyargs) else "normal",
            required=index < required,
        )
        for index, argument in enumerate(positional)
    ]
    if arguments.vararg:
        found.append(Parameter(name=arguments.vararg.arg, kind="args", required=False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(name=argument.arg, kind="keyword", required=default is None))
    if arguments.kwarg:
        found.append(Parameter(name=arguments.kwarg.arg, kind="kwargs", required=False))
    return tuple(found)
