"""The wheel: made without Node, small, with the page in it; the extra ``scope`` brings few packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mt_megatron.scope.web.assets import PAGE
from tests.launch import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings tomli to Python 3.10.
    import tomli as tomllib

MOST_PACKAGES = 10
MOST_BYTES = 5 * 2**20
"""Of the wheel's own files, unpacked."""


def closure(requirements: list[str]) -> set[str]:
    """Names of all packages that ``requirements`` bring here, as installed ones say."""
    found: set[str] = set()
    waiting = [(Requirement(each), "") for each in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found.add(name)
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        waiting += [(Requirement(each), one) for each in needs for one in ("", *requirement.extras)]
    return found


def test_extra_brings_few_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = closure(project["optional-dependencies"]["scope"])
    assert {"starlette", "uvicorn", "websockets"} <= extra - closure(project["dependencies"])
    # Also where nothing else brings some of them.
    assert {"h11", "click"} <= extra and len(extra) <= MOST_PACKAGES, sorted(extra)


@pytest.mark.daily
def test_wheel_is_made_without_node_is_small_and_has_the_page(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "mt_megatron", source / "mt_megatron", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    # Neither Node nor a compiler nor git is to be found.
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": ""}
    assert shutil.which("node", path=environment["PATH"]) is None
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--quiet", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        sizes = {each.filename: each.file_size for each in packed.infolist()}
        packed.extractall(tmp_path / "site")
    own = {name: size for name, size in sizes.items() if ".dist-info/" not in name}
    assert sum(own.values()) <= MOST_BYTES, sorted(own.items(), key=lambda pair: -pair[1])[:10]
    strangers = [name for name in own if not name.startswith("mt_megatron/") or "node_modules" in name]
    assert strangers == [] and not [name for name in own if name.endswith((".svelte", ".mjs", ".map"))]
    for path in PAGE.rglob("*"):
        if path.is_file():
            name = f"mt_megatron/scope/web/page/{path.relative_to(PAGE).as_posix()}"
            assert (tmp_path / "site" / name).read_bytes() == path.read_bytes(), name
    code = (
        "import mt_megatron.scope.web.assets as found; print(found.__file__); print(*sorted(found.assets()))"
    )
    environment |= {"PYTHONPATH": str(tmp_path / "site")}
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    where, files = shown.stdout.splitlines()
    assert where.startswith(str(tmp_path / "site"))
    assert {"/", "/assets/page.js", "/assets/page.css", "/assets/open.js"} <= set(files.split())
