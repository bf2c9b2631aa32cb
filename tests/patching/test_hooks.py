"""Modules imported after the commit are patched inside their own import, and stay what they are."""

from __future__ import annotations

import copy
import importlib
import importlib.resources
import importlib.util
import inspect
import pickle
import pkgutil
import sys
import types
import zipfile
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.errors import PatchError, PatchImportError
from mt_megatron.patching.hooks import ImportHook

from .conftest import Toy, snapshot

OWNER = """
def f(): return "original"
class C:
    def m(self): return "original"
"""


@pytest.fixture
def toy(toy: Toy) -> Toy:
    toy.write("owner", OWNER)
    return toy


def wrap_f(toy: Toy, **options: Any) -> Any:
    return toy.patch("f", "wrap", lambda original: "patched", **options)


def test_a_commit_imports_nothing(toy: Toy) -> None:
    applied = toy.commit(wrap_f(toy))
    assert not [name for name in sys.modules if name.startswith(toy.name)]
    (record,) = applied.report().pending
    assert record.why == f"module {toy.name}.owner is not imported yet"


@pytest.mark.parametrize(
    "consumer",
    [
        "from {toy}.owner import f\nseen = f()",
        "import {toy}.owner as o\nseen = o.f()",
        "from {toy} import owner\nseen = owner.f()",
        "import importlib\nseen = importlib.import_module('{toy}.owner').f()",
        "seen = __import__('{toy}.owner', fromlist=['f']).f()",
        "from .owner import *\nseen = f()",
        "from .owner import C\nfrom .owner import f as g\nseen = g()",
    ],
)
def test_a_consumer_never_sees_the_original(toy: Toy, consumer: str) -> None:
    toy.commit(wrap_f(toy))
    toy.write("user", consumer)
    assert toy.load("user").seen == "patched"


def test_a_decorator_of_a_consumer_gets_the_patched_function(toy: Toy) -> None:
    toy.write("owner", "def fuse(function): return None\n")
    toy.write("user", "from {toy}.owner import fuse\n@fuse\ndef g(): return 'kept'\n")
    toy.commit(toy.patch("fuse", "replace", lambda function: function))
    assert toy.load("user").g() == "kept"


def test_spec_and_loader_are_what_they_would_be(toy: Toy) -> None:
    plain = importlib.util.find_spec(f"{toy.name}.owner")
    assert plain is not None
    toy.commit(wrap_f(toy))
    owner = toy.load()
    spec = owner.__spec__
    assert spec is not None and type(spec) is ModuleSpec
    assert type(spec.loader) is SourceFileLoader and owner.__loader__ is spec.loader
    assert (spec.name, spec.origin, spec.cached, spec.has_location) == (
        plain.name,
        plain.origin,
        plain.cached,
        plain.has_location,
    )
    assert vars(spec.loader) == vars(plain.loader), "nothing of ours stays on the loader"
    assert spec.loader == plain.loader
    assert owner.__file__ == plain.origin and owner.__package__ == toy.name


def test_source_and_resources_can_be_read(toy: Toy) -> None:
    (toy.root / "data.txt").write_text("data")
    toy.write("__init__", "def g(): pass\n")
    toy.commit(wrap_f(toy), toy.patch("g", "wrap", lambda original: 1, module="__init__"))
    owner = toy.load()
    assert "def f()" in inspect.getsource(owner)
    assert owner.__loader__.get_source(f"{toy.name}.owner") == (toy.root / "owner.py").read_text()
    assert pkgutil.get_data(toy.name, "data.txt") == b"data"
    assert importlib.resources.files(toy.name).joinpath("data.txt").read_text() == "data"
    assert 'return "original"' in inspect.getsource(inspect.unwrap(owner.f))


def test_a_package_is_hooked_as_well(toy: Toy) -> None:
    toy.write("__init__", "def g(): return 'original'\nfrom . import owner\n")
    target = f"{toy.name}:g"
    from mt_megatron.patching.digest import source_of
    from mt_megatron.patching.spec import Patch

    patch = Patch(
        id="package",
        target=target,
        kind="wrap",
        reason="a test",
        body=lambda original: "patched",
        digest=source_of(target).digest,
    )
    toy.commit(patch, wrap_f(toy))
    package = importlib.import_module(toy.name)
    assert package.g() == "patched" and package.owner.f() == "patched"


def test_a_namespace_package_is_hooked_as_well(toy: Toy) -> None:
    (toy.root / "__init__.py").unlink()
    toy.commit(wrap_f(toy))
    assert toy.load().f() == "patched"
    package = sys.modules[toy.name]
    assert package.__file__ is None and package.__spec__ is not None


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_spec_that_was_only_found_can_be_pickled(toy: Toy, protocol: int) -> None:
    toy.commit(wrap_f(toy))
    spec = importlib.util.find_spec(f"{toy.name}.owner")
    data = pickle.dumps(spec, protocol)
    assert b"mt_megatron" not in data, "it can be read where this package is not"
    loaded = pickle.loads(data)
    assert loaded.origin == str(toy.root / "owner.py")
    module = types.ModuleType(spec.name)  # type: ignore[union-attr]
    loaded.loader.exec_module(module)
    assert module.f() == "original"


def test_a_loaded_spec_can_be_pickled_and_copied(toy: Toy) -> None:
    toy.commit(wrap_f(toy))
    spec = toy.load().__spec__
    assert spec is not None
    assert pickle.loads(pickle.dumps(spec)).origin == spec.origin
    assert copy.copy(spec).loader is spec.loader


def test_a_spec_executed_by_hand_is_patched(toy: Toy) -> None:
    toy.commit(wrap_f(toy))
    spec = importlib.util.find_spec(f"{toy.name}.owner")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert module.f() == "patched"


def test_a_lazily_loaded_module_is_patched(toy: Toy) -> None:
    toy.commit(wrap_f(toy))
    spec = importlib.util.find_spec(f"{toy.name}.owner")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert module.f() == "patched"


@pytest.mark.parametrize("early", [True, False])
def test_reload_applies_the_patches_again(toy: Toy, early: bool) -> None:
    if early:
        toy.load()
    added = toy.patch("added", "add", lambda: "added", id="added")
    applied = toy.commit(wrap_f(toy), toy.patch("C.m", "wrap", lambda original, self: "patched"), added)
    owner = toy.load()
    assert owner.f() == "patched" and owner.added() == "added"
    old_class = owner.C
    toy.write("owner", OWNER + "\nnew = 1\n")
    owner = importlib.reload(owner)
    assert owner.new == 1 and owner.f() == "patched" and owner.C().m() == "patched"
    assert owner.f.__wrapped__() == "original"
    owner = importlib.reload(importlib.reload(owner))
    assert owner.f() == "patched" and owner.f.__wrapped__() == "original" and owner.added() == "added"
    applied.revert()
    assert owner.f() == "original" and owner.C().m() == "original" and old_class().m() == "original"
    assert not hasattr(owner, "added")


def test_after_a_reload_old_consumers_get_their_original_back(toy: Toy) -> None:
    toy.write("user", "from {toy}.owner import f\n")
    applied = toy.commit(wrap_f(toy))
    user, owner = toy.load("user"), toy.load()
    importlib.reload(owner)
    assert user.f() == "patched" and user.f is not owner.f
    applied.revert()
    assert user.f() == "original" == owner.f()


def test_reload_of_a_consumer_sees_the_patch(toy: Toy) -> None:
    toy.write("user", "from {toy}.owner import f\n")
    user = toy.load("user")
    applied = toy.commit(wrap_f(toy))
    assert importlib.reload(user).f() == "patched"
    applied.revert()
    assert user.f() == "original"


def test_reload_after_revert_is_plain(toy: Toy) -> None:
    applied = toy.commit(wrap_f(toy))
    owner = toy.load()
    applied.revert()
    assert importlib.reload(owner).f() == "original"


def test_a_module_imported_anew_is_patched_anew(toy: Toy) -> None:
    applied = toy.commit(wrap_f(toy))
    first = toy.load()
    del sys.modules[first.__name__]
    second = toy.load()
    assert second is not first and first.f() == second.f() == "patched"
    applied.revert()
    assert first.f() == second.f() == "original"


def test_a_module_that_fails_by_itself_fails_as_ever(toy: Toy) -> None:
    applied = toy.commit(wrap_f(toy))
    toy.write("owner", OWNER + "\nraise KeyError('mine')\n")
    with pytest.raises(KeyError, match="mine"):
        toy.load()
    assert applied.active and f"{toy.name}.owner" not in sys.modules
    toy.write("owner", OWNER)
    assert toy.load().f() == "patched"


def test_a_module_that_does_not_exist_is_missing_as_ever(toy: Toy) -> None:
    applied = toy.commit(wrap_f(toy))
    (toy.root / "owner.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{toy.name}.owner'"):
        toy.load()
    assert applied.active


def test_a_late_failure_names_the_patch_and_undoes_everything(toy: Toy) -> None:
    toy.write("early", "def e(): return 'original'\n")
    toy.write("user", "from {toy}.owner import f\n")
    early = toy.load("early")
    before = snapshot(early)
    applied = toy.commit(
        toy.patch("e", "wrap", lambda original: "patched", module="early"),
        wrap_f(toy),
        toy.patch("C.m", "value", lambda original: 1 / 0, id="late.bad"),
    )
    assert early.e() == "patched"
    with pytest.raises(PatchImportError, match="late.bad.*ZeroDivisionError") as caught:
        toy.load("user")
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, PatchError)
    assert caught.value.name == f"{toy.name}.owner"
    assert isinstance(caught.value.__cause__, PatchError)
    assert snapshot(early) == before and not applied.active
    assert f"{toy.name}.owner" not in sys.modules
    assert {record.state for record in applied.report().patches} == {"undone"}
    assert toy.load("user").f() == "original"


def test_after_a_late_failure_earlier_consumers_have_the_original(toy: Toy) -> None:
    toy.write("second", "def s(): return 1\n")
    toy.write("user", "from {toy}.owner import f\ntable = {'f': f}\n")
    toy.commit(wrap_f(toy), toy.patch("s", "value", lambda original: 1 / 0, module="second"))
    user = toy.load("user")
    assert user.f() == "patched"
    with pytest.raises(PatchImportError):
        toy.load("second")
    assert user.f() == user.table["f"]() == toy.load().f() == "original"


def test_an_interrupt_in_a_late_patch_undoes_everything_too(toy: Toy) -> None:
    def interrupt(original: Any) -> Any:
        raise KeyboardInterrupt

    applied = toy.commit(toy.patch("f", "value", interrupt))
    with pytest.raises(KeyboardInterrupt):
        toy.load()
    assert not applied.active


def test_the_finder_is_in_front_while_active_and_gone_afterwards(toy: Toy) -> None:
    before = list(sys.meta_path)
    applied = toy.commit(wrap_f(toy))
    assert isinstance(sys.meta_path[0], ImportHook) and sys.meta_path[1:] == before
    applied.revert()
    assert sys.meta_path == before
    applied.revert()
    assert sys.meta_path == before


def test_a_plan_without_steps_needs_no_finder(toy: Toy) -> None:
    before = list(sys.meta_path)
    toy.commit()
    assert sys.meta_path == before


def test_finders_of_others_stay_where_they_are(toy: Toy) -> None:
    class Other:
        def find_spec(self, *_: object) -> None:
            return None

    applied = toy.commit(wrap_f(toy))
    mine = Other()
    sys.meta_path.insert(0, mine)  # type: ignore[arg-type]
    applied.revert()
    try:
        assert sys.meta_path[0] is mine and not any(isinstance(one, ImportHook) for one in sys.meta_path)
    finally:
        sys.meta_path.remove(mine)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["in front", "behind"])
def test_another_hook_that_asks_all_finders_gets_along(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Such as wrapt's: it calls ``importlib.util.find_spec`` and wraps what it gets."""
    seen: list[str] = []

    class Nosy:
        busy: set[str] = set()

        def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name in self.busy or not name.startswith(toy.name):
                return None
            self.busy.add(name)
            try:
                spec = importlib.util.find_spec(name)
            finally:
                self.busy.discard(name)
            if spec is not None and spec.loader is not None:
                plain = spec.loader.exec_module

                def execute(module: types.ModuleType) -> None:
                    plain(module)
                    seen.append(name)

                vars(spec.loader)["exec_module"] = execute
            return spec

    finders = sys.meta_path
    monkeypatch.setattr(sys, "meta_path", [*finders])
    if place == "behind":
        sys.meta_path.insert(0, Nosy())
    applied = toy.commit(wrap_f(toy))
    if place == "in front":
        sys.meta_path.insert(0, Nosy())
    assert toy.load().f() == "patched"
    assert f"{toy.name}.owner" in seen
    applied.revert()


def test_two_engines_side_by_side(toy: Toy) -> None:
    first = toy.commit(wrap_f(toy))
    second = toy.commit(toy.patch("C.m", "wrap", lambda original, self: "patched"))
    owner = toy.load()
    assert owner.f() == owner.C().m() == "patched"
    first.revert()
    assert owner.f() == "original" and owner.C().m() == "patched"
    second.revert()
    assert owner.C().m() == "original"


def test_modules_of_an_archive(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no source file to digest, but two of them share one loader object."""
    with zipfile.ZipFile(tmp_path / "toys.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "")
        archive.writestr("zipped/one.py", "def f(): return 'original'\n")
        archive.writestr("zipped/two.py", "def g(): return 'original'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "toys.zip"))
    executed: list[str] = []
    hook = ImportHook(
        lambda name: name.startswith("zipped."), lambda module: executed.append(module.__name__)
    )
    hook.install()
    try:
        importlib.import_module("zipped.one")
        importlib.import_module("zipped.two")
        assert executed == ["zipped.one", "zipped.two"]
        loaders = [sys.modules[name].__spec__.loader for name in ("zipped", "zipped.one")]  # type: ignore[union-attr]
        assert type(loaders[0]) is type(loaders[1])
        assert "exec_module" not in vars(loaders[0])
    finally:
        hook.remove()
        for name in [name for name in sys.modules if name.startswith("zipped")]:
            del sys.modules[name]


def test_a_loader_without_exec_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def load_module(self, name: str) -> types.ModuleType:
            raise AssertionError

    class Finder:
        def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, Old()) if name == "old_style" else None  # type: ignore[arg-type]

    hook = ImportHook(lambda name: name == "old_style", lambda module: None)
    monkeypatch.setattr(sys, "meta_path", [hook, Finder(), *sys.meta_path])
    with pytest.raises(PatchImportError, match="old_style is patched, but its loader Old"):
        importlib.import_module("old_style")


def test_unwatched_modules_are_not_touched(toy: Toy) -> None:
    toy.write("user", "x = 1\n")
    toy.commit(wrap_f(toy))
    hook = sys.meta_path[0]
    assert isinstance(hook, ImportHook)
    assert hook.find_spec(f"{toy.name}.user") is None
    toy.load("user")
    assert hook.hooked == set()
