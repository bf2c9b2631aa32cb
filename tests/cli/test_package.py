"""What pyproject.toml declares is what the source says and uses."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import mt_megatron
from mt_megatron.backends import registry
from mt_megatron.cli.doctor.host import REQUIRED

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings tomli to Python 3.10.
    import tomli as tomllib

ROOT = Path(__file__).parent.parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

DISTRIBUTION = {"yaml": "pyyaml", "megatron": "megatron-core"}
"""Distribution of an import whose name differs."""

GUARDED = {
    *("zarr", "tensorstore", "torch_musa", "pymtml", "apex", "transformer_engine"),
    *("sentencepiece", "zstandard", "pyarrow", "tensorboard", "wandb", "trackio", "pyverbs"),
    *("anyio", "h11", "starlette", "uvicorn", "triton"),
}
"""Imports of software that is optional: only where it is installed."""

CHECKOUT = {"tools"}
"""Imports that a checkout alone has; ``scan simulate`` looks for it first."""


def test_version_is_the_package_s_own() -> None:
    assert PROJECT["version"] == mt_megatron.__version__


def test_doctor_knows_the_declared_dependencies() -> None:
    assert {f"{name}{specifier}" for name, specifier in REQUIRED.items()} == set(PROJECT["dependencies"])


def test_an_installation_by_hand_names_them_all() -> None:
    """Where torch must stay the image's own, pip is told each of them."""
    lines = (ROOT / "docs" / "12-musa.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("pip install") and "pydantic" in line]
    named = {word.strip('"').partition(">")[0] for word in line.split()[2:]}
    assert {name for name in REQUIRED if name not in ("torch", "megatron-core")} <= named


def test_entry_points_lead_somewhere() -> None:
    module, _, name = PROJECT["scripts"]["mt-megatron"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    declared = PROJECT["entry-points"]["mt_megatron.backends"]
    assert declared == registry._BUILT_IN
    for reference in declared.values():
        module, _, name = reference.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def imported_distributions() -> set[str]:
    found = set()
    for path in (ROOT / "mt_megatron").rglob("*.py"):
        # Most of a file's nodes are expressions, and no import is one.
        nodes: list[ast.AST] = [ast.parse(path.read_text())]
        while nodes:
            node = nodes.pop()
            nodes += [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.expr)]
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            else:
                continue
            found |= {name.split(".")[0] for name in names}
    return {DISTRIBUTION.get(name, name) for name in found - set(sys.stdlib_module_names) - {"mt_megatron"}}


def test_everything_imported_is_declared_and_the_other_way_round() -> None:
    imported = imported_distributions()
    # Imported by megatron-core, which declares no dependencies of its own.
    for_upstream = {"einops"}
    assert imported - GUARDED - CHECKOUT <= set(REQUIRED)
    assert set(REQUIRED) - for_upstream <= imported


def test_python_bounds_are_those_of_upstream_s_wheels() -> None:
    assert PROJECT["requires-python"] == ">=3.10,<3.12"


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_files_of_the_project_are_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_changelog_has_this_version() -> None:
    assert f"## {mt_megatron.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_packages_have_an_init_so_that_wheels_hold_them() -> None:
    for path in (ROOT / "mt_megatron").rglob("*.py"):
        assert (path.parent / "__init__.py").is_file(), path.parent


def test_package_data_names_every_file_that_is_no_source() -> None:
    package = ROOT / "mt_megatron"
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = document["tool"]["setuptools"]["package-data"]["mt_megatron"]
    matched = {pattern: {path for path in package.glob(pattern) if path.is_file()} for pattern in patterns}
    # setuptools takes ``page/**`` for files too; glob knows folders alone.
    matched |= {pattern: set(package.glob(f"{pattern}/*")) for pattern in patterns if pattern.endswith("/**")}
    built = {".py", ".pyc", ".so"}
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in built}
    assert all(matched.values()), matched
    assert sorted(files - set().union(*matched.values())) == []


def test_type_checkers_of_users_are_told_of_the_annotations() -> None:
    assert (ROOT / "mt_megatron" / "py.typed").is_file()
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in document["tool"]["setuptools"]["package-data"]["mt_megatron"]
