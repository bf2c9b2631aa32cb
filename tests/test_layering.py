"""Dependencies point downwards only, and the patch engine knows nothing of torch or Megatron."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mt_megatron"
LEVELS = (
    {"cli"},
    {"diverge"},
    {"training", "convert", "scan", "scope", "launching"},
    {"models", "fp8", "pipeline"},
    {"comm", "patches"},
    {"layers"},
    {"patching", "backends", "seams", "parallel"},
)
"""Upper to lower; a package may import its own level and below. ``errors`` is below all."""

ALONE = {"scan", "scope", "seams"}
"""Packages that import no other package of their own level."""

PUBLIC = {"__init__", "_session", "errors"}
"""The public API and what implements it; ``errors`` is below everything."""


def level(package: str) -> int:
    return next(index for index, packages in enumerate(LEVELS) if package in packages)


def imports(tree: ast.AST, module: str) -> Iterator[tuple[str, int]]:
    """Every absolute module name that ``tree`` imports at run time, with its line."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue  # For the type checker alone: nothing is imported.
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{name}.{alias.name}", node.lineno) for alias in node.names)
        yield from imports(node, module)


FILES = sorted(PACKAGE.rglob("*.py"))

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

SMALL_FOLDERS = tuple(PACKAGE.parent / name for name in ("mt_megatron/scan", "tests/scan", "tools"))


def module_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(relative.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    module = module_of(path)
    own = module.split(".")[1]
    for name, line in imports(ast.parse(path.read_text()), module):
        parts = name.split(".")
        if parts[0] != "mt_megatron" or own in PUBLIC or len(parts) < 2 or parts[1] in PUBLIC:
            continue
        other = parts[1] if any(parts[1] in packages for packages in LEVELS) else own
        assert level(own) <= level(other), f"{path}:{line}: {own} imports {name}, which is above it"
        if own in ALONE and level(own) == level(other):
            assert own == other or other == "parallel", f"{path}:{line}: {own} imports {name}"
        if own == "patching":
            assert other == "patching", f"{path}:{line}: the engine imports {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "patching").glob("*.py")), ids=lambda path: path.name)
def test_the_patch_engine_knows_neither_torch_nor_megatron(path: Path) -> None:
    for name, line in imports(ast.parse(path.read_text()), module_of(path)):
        assert name.split(".")[0] not in ("torch", "megatron", "numpy"), f"{path}:{line}: imports {name}"


def test_every_package_has_a_level() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages <= set().union(*LEVELS)


def room_of(name: str) -> str | None:
    """The room of ``scan`` that a module or a name of it lies in."""
    inner = name.removeprefix("mt_megatron.scan.")
    if inner == name:
        return None
    rooms = [room for room in SCAN_ROOMS if f"{inner}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def scan_files() -> list[Path]:
    return sorted(path for path in (PACKAGE / "scan").rglob("*.py") if path.name != "__init__.py")


def test_the_rooms_of_scan_import_one_way() -> None:
    for path in scan_files():
        own = room_of(module_of(path))
        assert own is not None, f"{path} lies in no room"
        for name, line in imports(ast.parse(path.read_text()), module_of(path)):
            other = room_of(name)
            allowed = other is None or SCAN_ROOMS.index(other) <= SCAN_ROOMS.index(own)
            assert allowed, f"{path}:{line}: {own} imports {name}, which is above it"


def test_the_files_of_scan_import_each_other_in_no_circle() -> None:
    modules = {module_of(path): path for path in scan_files()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = [name for name, _ in imports(ast.parse(path.read_text()), module)]
        graph[module] = {
            other for other in modules if any(f"{name}.".startswith(f"{other}.") for name in names)
        }
    assert graph["mt_megatron.scan.diagnose.run"], "no import was recognised"
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("top", SMALL_FOLDERS, ids=lambda path: path.name)
def test_folders_stay_small_and_have_a_table_of_contents(top: Path) -> None:
    for folder in {path.parent for path in top.rglob("*.py")}:
        names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert len(names) <= MOST_MODULES, f"{folder} has {len(names)} modules; expected {MOST_MODULES}"
        if "tests" in folder.relative_to(PACKAGE.parent).parts:
            continue
        contents = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        named = {line.split()[0] for line in contents.splitlines() if line[:1].isalpha() and "  " in line}
        missing = {name for name in names if name not in named}
        assert not missing, f"{folder}/__init__.py does not list {sorted(missing)}"


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
        ("mt_megatron.models.x", "if TYPE_CHECKING:\n    import mt_megatron.cli", None),
    ],
)
def test_imports_are_recognised(module: str, source: str, found: str | None) -> None:
    assert [name for name, _ in imports(ast.parse(source), module)] == ([found] if found else [])
