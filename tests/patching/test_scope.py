"""Scopes of folders and names, and import statements that are answered for them."""

from __future__ import annotations

import builtins
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from mt_megatron.errors import PatchError
from mt_megatron.patching import importlib_bootstrap
from mt_megatron.patching.scope import Scope
from mt_megatron.patching.scoped import inside
from mt_megatron.patching.spec import Patch

from .conftest import Toy


def names(name: str, file: object = None) -> dict[str, object]:
    return {"__name__": name, "__file__": file}


@pytest.mark.parametrize(
    ("file", "inside"),
    [
        ("a.py", True),
        ("below/b.py", True),
        ("../beside/a.py", False),
        ("../appendix/a.py", False),
        ("venv/lib/python3.11/site-packages/x/y.py", False),
        ("lib/dist-packages/x.py", False),
        ("<string>", False),
    ],
)
def test_a_folder_reaches_what_lies_below_it_and_is_not_installed(
    tmp_path: Path, file: str, inside: bool
) -> None:
    app = tmp_path / "app"
    app.mkdir()
    scope = Scope(folders=[app])
    path = file if file.startswith("<") else str(app / file)
    assert scope.covers(names("x", path)) is inside
    assert scope.covers(names("x", path)) is inside, "the same from its memory"


def test_a_folder_can_be_named_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    scope = Scope(folders=[tmp_path / "link"])
    assert scope.covers(names("x", str(tmp_path / "real" / "a.py")))
    assert scope.covers(names("x", str(tmp_path / "link" / "a.py")))


def test_what_is_never_inside(tmp_path: Path) -> None:
    root = Scope(folders=[Path("/")])
    assert root.covers(names("mine", str(tmp_path / "mine.py")))
    assert not root.covers(names("torch.nn", "/src/torch/nn/__init__.py")), (
        "also built in a folder of one's own"
    )
    assert not root.covers(names("json", os.path.join(sysconfig.get_path("stdlib"), "json/__init__.py")))
    assert not root.covers({}) and not root.covers(names("x")) and not root.covers({"__name__": []})


def test_prefixes_are_dotted() -> None:
    scope = Scope(prefixes=["mine"])
    assert scope.covers(names("mine")) and scope.covers(names("mine.a")) and not scope.covers(names("mines"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("mine", "is one str"),
        (["numpy.linalg"], "can be in no scope"),
        (["absent/folder"], "neither a dotted module name nor a folder"),
        (["not-a-name"], "neither a dotted module name nor a folder"),
    ],
)
def test_wrong_entries_are_named(entries: object, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        Scope.of(entries)  # type: ignore[arg-type]


def test_equal_scopes_are_equal(tmp_path: Path) -> None:
    assert Scope.of(["b", "a", tmp_path]) == Scope.of([tmp_path, "a", "b"]) != Scope.of(["a"])
    assert not Scope() and Scope.of(["a"])


@pytest.fixture
def library(toy: Toy) -> str:
    """A library with a module inside, of which the scope shall see views."""
    folder = toy.folder / "lib_of_scope"
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text("answer = 'truth'\ndef call(): return answer\n")
    (folder / "inner.py").write_text("kept = 1\nanswer = 'inner truth'\n")
    return folder.name


USER = """
def plain():
    import lib_of_scope
    return lib_of_scope.answer
def alias():
    import lib_of_scope.inner as inner
    return inner.answer, inner.kept
def names():
    from lib_of_scope import answer, call
    return answer, call()
def star():
    names = {}
    exec("from lib_of_scope import *", {"__name__": __name__}, names)
    return names["answer"]
def missing():
    from lib_of_scope import absent
"""


def test_statements_in_functions_get_the_view_and_give_it_back(
    toy: Toy, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(toy.folder))
    __import__(f"{library}.inner")
    real = sys.modules[library]
    view = ModuleType(library)
    view.__dict__.update(vars(real), answer="view", inner=ModuleType(f"{library}.inner"))
    view.inner.__dict__.update(answer="inner view", kept=1)
    toy.write("user", USER)
    user = toy.load("user")
    (toy.folder / "outsider.py").write_text(USER)
    outsider = __import__("outsider")
    before = builtins.__import__
    applied = toy.commit(
        Patch(
            id="view",
            target=f"{library}:",
            kind="rebind",
            reason="for the test",
            body=lambda original: view,
            scope=(toy.name,),
        )
    )
    assert user.plain() == "view" and user.alias() == ("inner view", 1)
    assert user.names() == ("view", "truth"), "its functions are what the view says they are"
    assert user.star() == "truth", "a module's own statements are left to its rebinding"
    with pytest.raises(ImportError, match="absent"):
        user.missing()
    assert outsider.plain() == "truth" and outsider.alias() == ("inner truth", 1)
    applied.revert()
    assert builtins.__import__ is before
    assert user.plain() == "truth" and user.alias() == ("inner truth", 1)


def test_a_wrapper_of_somebody_elses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nobody:
        def see(self, module: ModuleType, *_: object, **__: object) -> ModuleType:
            return module

    before, viewer = builtins.__import__, Nobody()
    importlib_bootstrap.watch(viewer)
    ours = builtins.__import__
    builtins.__import__ = lambda *words, **more: ours(*words, **more)
    theirs = builtins.__import__
    try:
        importlib_bootstrap.unwatch(viewer)
        assert builtins.__import__ is theirs and __import__("json") is sys.modules["json"]
        importlib_bootstrap.watch(viewer)
        assert builtins.__import__ is theirs, "ours is inside of it already"
    finally:
        builtins.__import__ = ours
        importlib_bootstrap.unwatch(viewer)
    assert builtins.__import__ is before


def test_what_is_an_original_too_is_no_replacement_to_take_back() -> None:
    """A view may say ``cuda.Float`` by giving the library's own ``Float``."""
    real, view = ModuleType("library"), ModuleType("library")
    real.inner, view.inner = ModuleType("library.inner"), ModuleType("library.inner")  # type: ignore[attr-defined]
    shared, ours = object(), object()
    vars(real).update(Float=shared, size=1)
    vars(view).update(Float=shared, size=2)
    vars(real.inner).update(Float=object(), call=object())
    vars(view.inner).update(Float=shared, call=ours)
    found = {name: new for name, _, new in inside([(real, view)])}
    assert found == {name: new for name, _, new in inside([(real.inner, view.inner), (real, view)])}
    assert found == {"inner": view.inner, "call": ours}
