"""Dependencies point downwards only, no imports in circles, folders stay small and say what is in them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mt_megatron"
ROWS = (
    {"cli", "diverge", "launching"},
    {"training", "convert", "scan", "scope"},
    {"planning", "models", "data"},
    {"config", "checkpoint"},
    {"__init__", "_session"},
    {"patches", "layers", "fp8", "pipeline", "comm"},
    {"patching", "backends", "seams", "parallel"},
    {"host"},
    {"errors", "near_names", "version"},
)
"""Packages and files of ``mt_megatron``, upper to lower. A package imports its own row and those below;
within a row imports go one way, which the test of circles checks. ``__init__`` is the public API."""

APART = {
    "scan": {"training", "convert", "scope"},
    "scope": {"training", "convert"},
    "patching": {"backends", "seams", "parallel"},
}
"""Packages that can be used alone: what each of them does not import of its own row."""

SCAN_ROOMS = (
    "format",
    "record",
    "clock",
    "analysis",
    "findings",
    "diagnose.late_arrival",
    "diagnose.hops",
    "diagnose.slow_transfer",
    "diagnose",
    "export",
    "report",
    "monitor",
    "drill",
    "respond",
    "session",
)
"""Folders of ``scan``, lower to upper: a room imports itself and those before it. ``session`` is a file."""

MOST_MODULES = 20
"""In one folder, ``__init__`` aside."""

MOST_LINES = 600
"""Of one file."""


def imports(tree: ast.AST, module: str) -> Iterator[tuple[str, int]]:
    """Every absolute module name that ``tree`` imports at run time, with its line. ``module`` is the
    file's name; that of an ``__init__`` ends with ``.__init__``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue  # No expression holds a statement.
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue  # For the type checker alone: nothing is imported.
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{name}.{alias.name}", node.lineno) for alias in node.names)
        yield from imports(node, module)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def all_imports() -> dict[str, list[tuple[str, int]]]:
    """What each module imports, with the lines. Not made at import: every worker collects."""
    return {module: list(imports(ast.parse(path.read_text()), module)) for module, path in MODULES.items()}


def imported_module(name: str) -> str | None:
    """The module of the package that ``name``, a module or something inside one, lies in."""
    parts = name.split(".")
    while parts:
        for candidate in (".".join(parts), ".".join([*parts, "__init__"])):
            if candidate in MODULES:
                return candidate
        parts.pop()
    return None


def edges() -> Iterator[tuple[str, str, int]]:
    """Importing module, imported module and line, within the package."""
    for module, found in all_imports().items():
        for name, line in found:
            other = imported_module(name)
            if other is not None and other != module:
                yield module, other, line


def top(module: str) -> str:
    return module.split(".")[1]


def row(package: str) -> int:
    return next(index for index, packages in enumerate(ROWS) if package in packages)


def where(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


def circles(graph: dict[str, set[str]]) -> list[str]:
    """One line for each circle; its edges are left out of the search for further ones."""
    left = {node: set(others) for node, others in graph.items()}
    found = []
    while True:
        try:
            TopologicalSorter(left).prepare()
            return found
        except CycleError as error:
            circle = error.args[1]
            found.append(" <- ".join(circle))
            for imported, importer in zip(circle, circle[1:], strict=False):
                left[importer].discard(imported)


def test_every_package_has_a_row_and_every_row_exists() -> None:
    packages = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert packages == set().union(*ROWS)


def test_imports_point_downwards() -> None:
    wrong = []
    for module, other, line in edges():
        own, its = top(module), top(other)
        if row(own) > row(its) or its in APART.get(own, ()):
            wrong.append(f"{where(module, line)}: {own} imports {other}, which is above it or apart from it")
    assert not wrong, "\n".join(wrong)


def test_packages_import_each_other_in_no_circle() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for module, other, _ in edges():
        if top(module) != top(other):
            graph[top(module)].add(top(other))
    assert graph["cli"], "no import was recognised"
    assert not circles(graph), "\n".join(circles(graph))


def test_rooms_of_a_package_import_each_other_in_no_circle() -> None:
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, other, _ in edges():
        if module.endswith("__init__") or other.endswith("__init__"):
            continue  # A table of contents; what it gives to others comes from the rooms themselves.
        own, its = module.split("."), other.split(".")
        shared = next((i for i, (a, b) in enumerate(zip(own, its, strict=False)) if a != b), 0)
        if shared > 1:
            graphs[".".join(own[:shared])][own[shared]].add(its[shared])
    assert len(graphs) > 5, "no room was recognised"
    found = [f"{folder}: {circle}" for folder, graph in graphs.items() for circle in circles(graph)]
    assert not found, "\n".join(found)


def test_files_import_each_other_in_no_circle() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for module, other, _ in edges():
        graph[module].add(other)
    assert graph["mt_megatron.scan.diagnose.run"], "no import was recognised"
    assert not circles(graph), "\n".join(circles(graph))


def test_circles_are_recognised() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert len(circles({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}})) == 2


def test_the_patch_engine_knows_neither_torch_nor_megatron() -> None:
    wrong = [
        f"{where(module, line)}: imports {name}"
        for module, found in all_imports().items()
        if top(module) == "patching"
        for name, line in found
        if name.split(".")[0] in ("torch", "megatron", "numpy")
    ]
    assert not wrong, "\n".join(wrong)


def room_of(name: str) -> str | None:
    """The room of ``scan`` that a module or a name of it lies in."""
    inner = name.removeprefix("mt_megatron.scan.")
    if inner == name:
        return None
    rooms = [room for room in SCAN_ROOMS if f"{inner}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def test_the_rooms_of_scan_import_one_way() -> None:
    wrong = []
    for module, found in all_imports().items():
        if top(module) != "scan" or module.endswith("__init__"):
            continue
        own = room_of(module)
        assert own is not None, f"{module} lies in no room"
        for name, line in found:
            other = room_of(name)
            if other is not None and SCAN_ROOMS.index(other) > SCAN_ROOMS.index(own):
                wrong.append(f"{where(module, line)}: {own} imports {name}, which is above it")
    assert not wrong, "\n".join(wrong)


def folders() -> list[Path]:
    tops = [ROOT / name for name in ("mt_megatron", "tests", "tools", "benchmarks")]
    return sorted({path.parent for top_folder in tops for path in top_folder.rglob("*.py")})


def test_folders_and_files_stay_small() -> None:
    wrong = []
    for folder in folders():
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        if len(files) > MOST_MODULES:
            wrong.append(f"{folder.relative_to(ROOT)} has {len(files)} modules; expected {MOST_MODULES}")
        for path in files:
            lines = len(path.read_text().splitlines())
            if lines > MOST_LINES:
                wrong.append(f"{path.relative_to(ROOT)} has {lines} lines; expected {MOST_LINES} at most")
    assert not wrong, "\n".join(wrong)


def test_every_folder_has_a_table_of_contents() -> None:
    wrong = []
    for folder in folders():
        if folder.relative_to(ROOT).parts[0] not in ("mt_megatron", "tools"):
            continue
        names = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
        names |= {path.parent.name for path in folder.glob("*/__init__.py")}
        contents = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        first = [line.split()[0].rstrip("/") for line in contents.splitlines() if re.match(r"\S+  ", line)]
        named = {name for name in first if "." not in name}  # Without data files.
        if names != named:
            wrong.append(
                f"{folder.relative_to(ROOT)}/__init__.py lists {sorted(named ^ names)} or lacks them"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("mt_megatron.seams.x", "from ..training import loop", "mt_megatron.training.loop"),
        (
            "mt_megatron.seams.x",
            "def f():\n    from ..training.loop import run",
            "mt_megatron.training.loop.run",
        ),
        ("mt_megatron.models.x", "import mt_megatron.cli.main", "mt_megatron.cli.main"),
        ("mt_megatron.models.x", "from . import y", "mt_megatron.models.y"),
        ("mt_megatron.models.__init__", "from . import y", "mt_megatron.models.y"),
        ("mt_megatron.models.x", "if TYPE_CHECKING:\n    import mt_megatron.cli", None),
    ],
)
def test_imports_are_recognised(module: str, source: str, found: str | None) -> None:
    assert [name for name, _ in imports(ast.parse(source), module)] == ([found] if found else [])
