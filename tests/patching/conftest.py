"""A package written for one test: unique name, own folder, gone afterwards."""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import FileFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mt_megatron.patching import rebind, referrers
from mt_megatron.patching.digest import source_of
from mt_megatron.patching.engine import AppliedPlan, commit
from mt_megatron.patching.plan import Settings, make_plan
from mt_megatron.patching.spec import Patch

_numbers = itertools.count()


class Toy:
    """Writes modules, declares patches of them with the right digest, and commits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"toy{next(_numbers)}"
        self.root = folder / self.name
        self.root.mkdir()
        self.write("__init__", "")
        self.applied: list[AppliedPlan] = []

    def write(self, module: str, source: str) -> Path:
        """Write a module of the package; ``{toy}`` in its source is the package's name."""
        path = self.root / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source).replace("{toy}", self.name))
        # The finders of this folder alone: a process with thousands of tests has thousands of others.
        for folder in [one for one in path.parents if one.is_relative_to(self.folder)]:
            finder = sys.path_importer_cache.get(str(folder))
            if isinstance(finder, FileFinder):
                finder.invalidate_caches()
        return path

    def load(self, module: str = "owner") -> ModuleType:
        return importlib.import_module(f"{self.name}.{module}")

    def target(self, qualname: str, module: str = "owner") -> str:
        return f"{self.name}.{module}:{qualname}"

    def patch(
        self,
        qualname: str,
        kind: str,
        body: Any,
        *,
        id: str | None = None,
        module: str = "owner",
        **options: Any,
    ) -> Patch:
        target = self.target(qualname, module)
        if kind in ("wrap", "replace", "constant") and "digest" not in options:
            options["digest"] = source_of(target).digest
        return Patch(
            id=id or f"test.{qualname}.{kind}",
            target=target,
            kind=kind,  # type: ignore[arg-type]
            reason="a test",
            body=body,
            **options,
        )

    def commit(
        self, *patches: Patch, strict: bool = True, features: Sequence[str] | None = None
    ) -> AppliedPlan:
        plan = make_plan(patches, backend="cpu", strict=strict, features=features)
        applied = commit(plan)
        self.applied.append(applied)
        return applied


def snapshot(*owners: Any) -> dict[tuple[str, str], int]:
    """Identity of everything in the dicts of modules and of their classes."""
    found: dict[tuple[str, str], int] = {}
    for owner in owners:
        for name, value in vars(owner).items():
            if name in ("__doc__", "__dict__", "__weakref__"):
                continue
            found[owner.__name__, name] = id(value)
            if isinstance(value, type) and value.__module__ == owner.__name__:
                found |= {(value.__qualname__, key): id(item) for key, item in vars(value).items()}
    return found


class _LaterModules:
    """``sys.modules`` without most of what was there before; ``seen`` are packages that stay."""

    def __init__(self, *seen: str) -> None:
        self._before = {name for name in sys.modules if name.partition(".")[0] not in seen}

    def copy(self) -> dict[str, ModuleType]:
        every = sys.modules.copy()
        return {name: every[name] for name in every.keys() - self._before}

    def values(self) -> Iterable[ModuleType]:
        return self.copy().values()


@pytest.fixture(scope="module", autouse=True)
def _holders_of_the_test_alone() -> Iterator[None]:
    """The engine asks every module, then the collector, for the holders of an object. What the process had
    before is no holder of what a test makes, and is passed by but for some modules: a process with thousands
    of tests has thousands of modules and millions of objects."""
    gc.collect()
    gc.freeze()
    modules = _LaterModules("mt_megatron", "json", "collections", "__main__")
    with pytest.MonkeyPatch.context() as change:
        for asking in (rebind, referrers):
            change.setattr(asking, "sys", SimpleNamespace(modules=modules, getrefcount=sys.getrefcount))
        yield
    gc.unfreeze()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    made = Toy(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield made
    for applied in made.applied:
        applied.roll_back()
    for name in [name for name in sys.modules if name.split(".")[0] == made.name]:
        del sys.modules[name]
    for folder in [one for one in sys.path_importer_cache if one.startswith(str(tmp_path))]:
        del sys.path_importer_cache[folder]
    assert not [one for one in sys.meta_path if hasattr(one, "is_patch_hook")], "a finder was left behind"


@pytest.fixture
def plan() -> Callable[..., Any]:
    """``make_plan`` without a cache file, for patches that need no toy package."""

    def make(*patches: Patch, options: Mapping[str, Any] | None = None, **settings: Any) -> Any:
        return make_plan(patches, backend="cpu", settings=Settings(**settings), **(options or {}))

    return make
