"""``rebind``: what the modules of a scope mean by a name, while everybody else is left alone."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.errors import PatchConflictError, PatchError, PatchImportError
from mt_megatron.patching.spec import Patch

from .conftest import Toy, snapshot

LIBRARY = """
import types
def call(): return "real"
class device: pass
inner = types.ModuleType("inner")
inner.name = "real"
"""

USER = """
import {lib}
import {lib} as alias
from {lib} import call, call as again, device
import {lib}.sub
from {lib}.sub import deep

class K:
    method = call
    box = staticmethod(call)

    def use(self, function=call, *, other=call, module={lib}):
        return function(), other(), module

def outer(function=call, pair=(1, call)):
    return function(), pair[1]()

items = [call]
"""


@pytest.fixture
def lib(toy: Toy, tmp_path: Path) -> Iterator[str]:
    """A library apart from the scoped package."""
    name = f"lib{toy.name}"
    folder = tmp_path / name
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text(LIBRARY)
    (folder / "sub" / "__init__.py").write_text("def deep(): return 'real'\n")
    toy.write("user", USER.replace("{lib}", name))
    (tmp_path / f"by{name}.py").write_text(USER.replace("{lib}", name))
    yield name
    for module in [one for one in sys.modules if name in one]:
        del sys.modules[module]


def view() -> Any:
    made = types.ModuleType("view")
    vars(made)["call"] = lambda: "view"
    return made


def rebind(toy: Toy, lib: str, qualname: str = "", body: Any = None, **options: Any) -> Patch:
    module, _, name = qualname.rpartition(":")
    return Patch(
        id=options.pop("id", f"see.{qualname or 'lib'}"),
        target=f"{lib}{module}:{name}",
        kind="rebind",
        reason="a test",
        body=body or (lambda original: lambda: "view"),
        scope=options.pop("scope", (toy.name,)),
        **options,
    )


def everything(toy: Toy, lib: str) -> tuple[list[Patch], Any]:
    seen = view()
    return [
        rebind(toy, lib, "", lambda original: seen),
        rebind(toy, lib, "call"),
        rebind(toy, lib, ".sub:deep", lambda original: lambda: "deep view"),
        rebind(toy, lib, "device", lambda original: int),
    ], seen


ORDERS = ["library, user, patch", "library, patch, user", "patch, library, user", "patch, user"]


@pytest.mark.parametrize("order", ORDERS)
def test_in_any_order_the_scope_sees_the_view_and_others_do_not(toy: Toy, lib: str, order: str) -> None:
    patches, seen = everything(toy, lib)
    applied = None
    bystander = None
    for step in order.split(", "):
        if step == "library":
            importlib.import_module(lib)
        elif step == "user":
            toy.load("user")
            bystander = importlib.import_module(f"by{lib}")
        else:
            applied = toy.commit(*patches)
    assert applied is not None and bystander is not None
    user = toy.load("user")
    assert getattr(user, lib) is seen and user.alias is seen
    assert [user.call(), user.again(), user.deep()] == ["view", "view", "deep view"]
    assert user.device is int
    assert vars(user.K)["method"]() == "view" and user.K.box() == "view"
    assert user.K().use() == ("view", "view", seen)
    assert user.outer() == ("view", "view")
    real = sys.modules[lib]
    assert real.call() == "real" and real.device is not int and real.sub.deep() == "real"
    assert (
        getattr(bystander, lib) is real
        and bystander.call() == "real"
        and bystander.outer() == ("real", "real")
    )
    assert not applied.report().pending
    applied.revert()
    assert getattr(user, lib) is real is user.alias
    assert [user.call(), user.again(), user.deep()] == ["real"] * 3
    assert user.device is real.device and user.outer() == ("real", "real")
    assert user.K().use() == ("real", "real", real) and vars(user.K)["box"].__func__ is real.call


def test_everything_is_put_back_exactly(toy: Toy, lib: str) -> None:
    user, library = toy.load("user"), importlib.import_module(lib)
    before = snapshot(user, library, sys.modules[f"{lib}.sub"])
    defaults = [user.outer.__defaults__, user.K.use.__defaults__, dict(user.K.use.__kwdefaults__)]
    patches, _ = everything(toy, lib)
    applied = toy.commit(*patches)
    assert snapshot(user, library, sys.modules[f"{lib}.sub"]) != before
    applied.revert()
    assert snapshot(user, library, sys.modules[f"{lib}.sub"]) == before
    assert user.outer.__defaults__ is defaults[0] and user.K.use.__defaults__ is defaults[1]
    assert user.K.use.__kwdefaults__ == defaults[2]


def test_a_commit_does_not_import_the_library(toy: Toy, lib: str) -> None:
    patches, _ = everything(toy, lib)
    applied = toy.commit(*patches)
    assert lib not in sys.modules
    assert len(applied.report().pending) == len(patches)


def test_a_body_is_called_once(toy: Toy, lib: str) -> None:
    calls: list[object] = []

    def body(original: object) -> object:
        calls.append(original)
        return lambda: "view"

    toy.commit(rebind(toy, lib, "call", body))
    toy.load("user")
    toy.write("second", f"from {lib} import call\n")
    assert toy.load("second").call() == "view"
    assert calls == [sys.modules[lib].call]


@pytest.mark.parametrize(
    ("scope", "inside"),
    [("{toy}", True), ("{toy}.user", True), ("{toy}.us", False), ("{toy}x", False), ("other", False)],
)
def test_a_scope_is_a_dotted_prefix(toy: Toy, lib: str, scope: str, inside: bool) -> None:
    toy.commit(rebind(toy, lib, "call", scope=(scope.replace("{toy}", toy.name),)))
    assert (toy.load("user").call() == "view") is inside


def test_two_scopes_can_mean_different_things(toy: Toy, lib: str) -> None:
    toy.write("one", f"from {lib} import call\n")
    toy.write("two", f"from {lib} import call\n")
    applied = toy.commit(
        rebind(toy, lib, "call", lambda original: lambda: 1, scope=(f"{toy.name}.one",), id="one"),
        rebind(toy, lib, "call", lambda original: lambda: 2, scope=(f"{toy.name}.two",), id="two"),
    )
    assert (toy.load("one").call(), toy.load("two").call(), toy.load("user").call()) == (1, 2, "real")
    applied.revert()
    assert (toy.load("one").call(), toy.load("two").call()) == ("real", "real")


def test_one_patch_can_have_several_scopes(toy: Toy, lib: str) -> None:
    toy.write("one", f"from {lib} import call\n")
    toy.write("two", f"from {lib} import call\n")
    toy.commit(rebind(toy, lib, "call", scope=(f"{toy.name}.one", f"{toy.name}.two")))
    assert (toy.load("one").call(), toy.load("two").call(), toy.load("user").call()) == (
        "view",
        "view",
        "real",
    )


def test_an_owner_in_the_scope_keeps_its_original(toy: Toy) -> None:
    toy.write("owner", "def f(): return 'real'\ndef g(): return f()\n")
    toy.write("user", "from .owner import f\n")
    applied = toy.commit(
        toy.patch("f", "rebind", lambda original: lambda: ("view", original()), scope=(toy.name,))
    )
    user, owner = toy.load("user"), toy.load()
    assert user.f() == ("view", "real") and owner.f() == owner.g() == "real"
    applied.revert()
    assert user.f() == "real"


def test_one_object_under_two_names_may_have_one_meaning(toy: Toy, lib: str) -> None:
    seen = view()
    importlib.import_module(f"{lib}.sub")
    patches = [
        rebind(toy, lib, "inner", lambda original: seen, id="a"),
        rebind(toy, lib, "same", lambda original: seen, id="b"),
    ]
    library = importlib.import_module(lib)
    library.same = library.inner
    toy.write("user2", f"from {lib} import inner\n")
    toy.commit(*patches)
    assert toy.load("user2").inner is seen


def test_one_object_under_two_names_must_not_have_two_meanings(toy: Toy, lib: str) -> None:
    library = importlib.import_module(lib)
    library.same = library.call
    user = toy.load("user")
    before = snapshot(user)
    with pytest.raises(PatchConflictError, match="patches a and b rebind the same object"):
        toy.commit(rebind(toy, lib, "call", id="a"), rebind(toy, lib, "same", id="b"))
    assert snapshot(user) == before


def test_a_name_that_does_not_exist_is_an_error(toy: Toy, lib: str) -> None:
    importlib.import_module(lib)
    with pytest.raises(PatchError, match="patch ghost of .*:nothing failed: AttributeError"):
        toy.commit(rebind(toy, lib, "nothing", id="ghost"))


def test_a_name_that_does_not_exist_fails_the_late_import(toy: Toy, lib: str) -> None:
    applied = toy.commit(rebind(toy, lib, "call"), rebind(toy, lib, "nothing", id="ghost"))
    with pytest.raises(PatchImportError, match="ghost"):
        toy.load("user")
    assert not applied.active
    assert toy.load("user").call() == "real"


def test_a_body_that_fails_undoes_the_rest(toy: Toy, lib: str) -> None:
    user = toy.load("user")
    before = snapshot(user)
    with pytest.raises(PatchError, match="bad"):
        toy.commit(rebind(toy, lib, "call"), rebind(toy, lib, "device", lambda original: 1 / 0, id="bad"))
    assert snapshot(user) == before


def test_one_replacement_for_two_originals_is_told_apart_by_name(toy: Toy, lib: str) -> None:
    toy.write("middle", f"from {lib} import call, device\n")
    toy.write("third", "from .middle import call, device\n")

    def same() -> None: ...

    applied = toy.commit(
        rebind(toy, lib, "call", lambda original: same), rebind(toy, lib, "device", lambda original: same)
    )
    third = toy.load("third")
    assert third.call is third.device is same
    applied.revert()
    real = sys.modules[lib]
    assert third.call is real.call and third.device is real.device
    assert toy.load("middle").call is real.call and toy.load("middle").device is real.device


def test_a_view_passed_on_inside_of_the_scope_is_given_back(toy: Toy, lib: str) -> None:
    toy.write("middle", f"import {lib} as library\nfrom {lib} import call\n")
    toy.write("third", "from .middle import library, call\ndef use(function=call): return function()\n")
    patches, seen = everything(toy, lib)
    applied = toy.commit(*patches)
    third = toy.load("third")
    assert third.library is seen and third.call() == third.use() == "view"
    applied.revert()
    assert third.library is sys.modules[lib] and third.call() == third.use() == "real"


def test_reload_of_a_scoped_module_rebinds_it_again(toy: Toy, lib: str) -> None:
    patches, seen = everything(toy, lib)
    applied = toy.commit(*patches)
    user = toy.load("user")
    for _ in range(2):
        user = importlib.reload(user)
        assert getattr(user, lib) is seen and user.call() == "view" and user.outer() == ("view", "view")
    applied.revert()
    assert getattr(user, lib) is sys.modules[lib] and user.outer() == ("real", "real")


def test_the_view_may_be_the_original(toy: Toy, lib: str) -> None:
    user = toy.load("user")
    before = snapshot(user)
    applied = toy.commit(rebind(toy, lib, "call", lambda original: original))
    assert snapshot(user) == before
    applied.revert()


def test_rebind_and_wrap_of_one_library(toy: Toy, lib: str) -> None:
    """A wrap of a method is for everybody, the view for the scope."""
    (toy.folder / lib / "sub" / "__init__.py").write_text(
        "class T:\n    def m(self): return 'real'\ndeep = 1\n"
    )
    wrap = Patch(
        id="w",
        target=f"{lib}.sub:T.m",
        kind="value",
        reason="a test",
        body=lambda original: lambda self: ("wrapped", original(self)),
    )
    seen = view()
    applied = toy.commit(wrap, rebind(toy, lib, "", lambda original: seen))
    user = toy.load("user")
    assert getattr(user, lib) is seen
    assert sys.modules[f"{lib}.sub"].T().m() == ("wrapped", "real")
    applied.revert()
    assert sys.modules[f"{lib}.sub"].T().m() == "real"


def test_threads_that_import_scoped_modules_at_once(toy: Toy, lib: str) -> None:
    for index in range(8):
        toy.write(f"user{index}", f"import time\nimport {lib}\ntime.sleep(0.02)\nfrom {lib} import call\n")
    patches, seen = everything(toy, lib)
    applied = toy.commit(*patches)
    start = threading.Barrier(8)

    def load(index: int) -> None:
        start.wait(10)
        toy.load(f"user{index}")

    threads = [threading.Thread(target=load, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [toy.load(f"user{index}").call() for index in range(8)] == ["view"] * 8
    assert all(getattr(toy.load(f"user{index}"), lib) is seen for index in range(8))
    applied.revert()
    assert [toy.load(f"user{index}").call() for index in range(8)] == ["real"] * 8
