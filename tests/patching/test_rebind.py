"""Whoever bound the original early, wherever it is kept, sees the patch, and gets the original back."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.errors import PatchConflictError, PatchError, PatchImportError

from .conftest import Toy, snapshot
from .holders import HOLDERS, STUCK

OWNER = """
def f(): return "original"

class C:
    def m(self): return "original"
    @staticmethod
    def s(): return "original"
    @classmethod
    def k(cls): return "original"

class Plain: pass
FLAG = False
"""


@pytest.fixture
def owner(toy: Toy) -> types.ModuleType:
    toy.write("owner", OWNER)
    toy.write("middle", "from {toy}.owner import f as g")
    return toy.load()


def patched() -> str:
    return "patched"


def replace_f(toy: Toy, **options: Any) -> Any:
    return toy.patch("f", "replace", patched, **options)


@pytest.mark.parametrize("kind", ["replace", "wrap", "value"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_rebinds(toy: Toy, owner: types.ModuleType, holder: str, kind: str) -> None:
    source, use = HOLDERS[holder]
    toy.write("user", source)
    user = toy.load("user")
    bodies: dict[str, Any] = {
        "replace": patched,
        "wrap": lambda original: "patched",
        "value": lambda original: lambda: "patched",
    }
    original = eval(use, vars(user))
    assert set(original.replace("original", "")) == set()
    before = snapshot(owner, user)
    applied = toy.commit(toy.patch("f", kind, bodies[kind]))
    assert eval(use, vars(user)) == original.replace("original", "patched")
    applied.revert()
    assert eval(use, vars(user)) == original
    assert snapshot(owner, user) == before


@pytest.mark.parametrize("holder", HOLDERS)
def test_who_binds_the_patched_value_later_gets_the_original_back(
    toy: Toy, owner: types.ModuleType, holder: str
) -> None:
    source, use = HOLDERS[holder]
    toy.write("user", source)
    applied = toy.commit(toy.patch("f", "wrap", lambda original: "patched"))
    user = toy.load("user")
    assert set(eval(use, vars(user)).replace("patched", "")) == set()
    applied.revert()
    assert set(eval(use, vars(user)).replace("original", "")) == set()


def test_these_tests_can_fail(toy: Toy, owner: types.ModuleType) -> None:
    """What is asked for by a test of ``test_rebinds`` does not come about by itself."""
    for name, (source, use) in HOLDERS.items():
        path = f"user{abs(hash(name))}"
        toy.write(path, source)
        user = toy.load(path)
        owner.f, kept = patched, owner.f
        assert "patched" not in eval(use, vars(user)), name
        owner.f = kept


def test_rebinds_in_other_packages(toy: Toy, owner: types.ModuleType, tmp_path: Path) -> None:
    (tmp_path / "foreign_user.py").write_text(f"from {toy.name}.owner import f as theirs\n")
    import foreign_user  # type: ignore[import-not-found]

    try:
        applied = toy.commit(replace_f(toy))
        assert foreign_user.theirs() == "patched"
        (record,) = applied.report().applied
        assert record.rebound == ("name 'theirs' of module 'foreign_user'",)
        applied.revert()
        assert foreign_user.theirs() == "original"
    finally:
        del sys.modules["foreign_user"]


def test_rebinds_in_main(toy: Toy) -> None:
    toy.write("owner", OWNER)
    script = f"""
    from {toy.name}.owner import f as mine
    class Here:
        call = mine
    def use(call=mine): return call()
    from mt_megatron.patching.engine import commit
    from mt_megatron.patching.plan import make_plan
    from mt_megatron.patching.digest import source_of
    from mt_megatron.patching.spec import Patch
    target = "{toy.name}.owner:f"
    patch = Patch(id="p", target=target, kind="wrap", reason="r", digest=source_of(target).digest,
                  body=lambda original: "patched")
    applied = commit(make_plan([patch], backend="cpu"))
    assert [mine(), vars(Here)["call"](), use()] == ["patched"] * 3
    applied.revert()
    assert [mine(), vars(Here)["call"](), use()] == ["original"] * 3
    print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": f"{toy.folder}:{Path(__file__).parents[2]}"},
    )
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize(
    ("name", "holder", "use"),
    [
        ("C.m", "from {toy}.owner import C\nclass D(C):\n    n = C.m", "D().n() + D().m()"),
        ("C.m", "from {toy}.owner import C\ncall = C.m", "call(None)"),
        ("C.m", "from {toy}.owner import C\ncall = C().m", "call()"),
        ("C.m", "from {toy}.owner import C\ncalls = [C().m, (C().m,)]", "calls[0]() + calls[1][0]()"),
        ("C.s", "from {toy}.owner import C\ncall = C.s", "call()"),
        ("C.s", "from {toy}.owner import C\nclass D:\n    n = vars(C)['s']", "D.n()"),
        ("C.s", "from {toy}.owner import C\ntable = {'s': C.s}", "table['s']()"),
        ("C.k", "from {toy}.owner import C\ncall = C.k", "call()"),
        ("C.k", "from {toy}.owner import C\nclass D:\n    n = vars(C)['k']", "D.n()"),
    ],
)
def test_rebinds_methods_that_are_held_by_themselves(
    toy: Toy, owner: types.ModuleType, name: str, holder: str, use: str
) -> None:
    toy.write("user", holder)
    user = toy.load("user")
    before = snapshot(owner, user)
    applied = toy.commit(toy.patch(name, "wrap", lambda original, *args: "patched"))
    assert set(eval(use, vars(user)).replace("patched", "")) == set()
    applied.revert()
    assert set(eval(use, vars(user)).replace("original", "")) == set()
    assert snapshot(owner, user) == before


def test_a_descriptor_held_twice_stays_one_object(toy: Toy, owner: types.ModuleType) -> None:
    toy.write("user", "from {toy}.owner import C\nclass D:\n    n = vars(C)['s']")
    user = toy.load("user")
    applied = toy.commit(toy.patch("C.s", "wrap", lambda original: "patched"))
    assert vars(user.D)["n"] is vars(owner.C)["s"]
    applied.revert()
    assert vars(user.D)["n"] is vars(owner.C)["s"]


def test_several_patches_share_one_tuple(toy: Toy, owner: types.ModuleType) -> None:
    toy.write(
        "user", "from {toy}.owner import f, C\nitems = (f, C.m, f)\ndef use(a=f, b=C.m): return a(), b(0)"
    )
    user = toy.load("user")
    items, defaults = user.items, user.use.__defaults__
    applied = toy.commit(
        replace_f(toy), toy.patch("C.m", "wrap", lambda original, self: "patched"), strict=True
    )
    assert [one(*[0] * index) for index, one in enumerate(user.items[:2])] == ["patched", "patched"]
    assert user.use() == ("patched", "patched")
    applied.revert()
    assert user.items is items and user.use.__defaults__ is defaults


def test_a_reference_from_the_owner_itself_is_rebound(toy: Toy) -> None:
    toy.write("owner", OWNER + "\nalias = f\ntable = {'f': f}\ndef use(call=f): return call()\n")
    owner = toy.load()
    applied = toy.commit(replace_f(toy))
    assert [owner.alias(), owner.table["f"](), owner.use()] == ["patched"] * 3
    applied.revert()
    assert [owner.alias(), owner.table["f"](), owner.use()] == ["original"] * 3


def test_the_owners_own_references_are_rebound_on_import_too(toy: Toy) -> None:
    toy.write("owner", OWNER + "\nalias = f\ntable = {'f': f}\ndef use(call=f): return call()\n")
    toy.commit(replace_f(toy))
    owner = toy.load()
    assert [owner.alias(), owner.table["f"](), owner.use()] == ["patched"] * 3


def test_what_a_body_keeps_is_left_to_it(toy: Toy, owner: types.ModuleType) -> None:
    kept = owner.f

    def through_closure() -> Any:
        return ("patched", kept())

    def through_default(call: Callable[[], str] = owner.f) -> Any:
        return ("patched", call())

    applied = toy.commit(toy.patch("f", "replace", through_closure))
    assert owner.f() == ("patched", "original")
    applied.revert()
    applied = toy.commit(toy.patch("f", "replace", through_default))
    assert owner.f() == ("patched", "original")
    applied.revert()
    assert owner.f() == "original"


@pytest.mark.parametrize("holder", STUCK)
def test_strict_refuses_a_holder_that_cannot_be_rebound(
    toy: Toy, owner: types.ModuleType, holder: str
) -> None:
    source, name = STUCK[holder]
    toy.write("user", source)
    user = toy.load("user")
    before = snapshot(owner, user)
    with pytest.raises(
        PatchError, match=rf"cannot be rebound: .*owner:f \(patch test.f.replace\) by .*{name}.*strict=False"
    ):
        toy.commit(replace_f(toy))
    assert snapshot(owner, user) == before
    assert owner.f() == "original"


@pytest.mark.parametrize("holder", STUCK)
def test_without_strict_such_a_holder_is_reported(toy: Toy, owner: types.ModuleType, holder: str) -> None:
    source, name = STUCK[holder]
    toy.write("user", source)
    toy.load("user")
    applied = toy.commit(replace_f(toy), strict=False)
    assert owner.f() == "patched"
    (text,) = applied.report().unrebindable
    assert name in text


def test_a_holder_that_is_garbage_is_no_holder(toy: Toy, owner: types.ModuleType) -> None:
    gc.disable()
    try:
        toy.write(
            "user",
            "from {toy}.owner import f\nfrom collections import deque\nd = deque([f])\nd.append(d)\ndel d",
        )
        toy.load("user")
        applied = toy.commit(replace_f(toy))
        assert owner.f() == "patched" and not applied.report().unrebindable
    finally:
        gc.enable()


def test_a_call_in_progress_is_noted(toy: Toy, owner: types.ModuleType) -> None:
    def running() -> Any:
        call = owner.f
        yield
        yield call()

    generator = running()
    next(generator)
    applied = toy.commit(replace_f(toy))
    assert next(generator) == "original", "what runs goes on with what it began with"
    assert any("goes on with the original" in text for text in applied.report().warnings)


def class_body(toy: Toy, **attributes: Any) -> type:
    return type("Plain", (), {"__module__": f"{toy.name}.owner", "new": True, **attributes})


def test_a_replaced_class_is_rebound(toy: Toy, owner: types.ModuleType) -> None:
    toy.write(
        "user",
        """
        from {toy}.owner import Plain as P
        table = {"p": P}
        def use(cls=P): return cls
        def annotated(x: P) -> "P | None": return x
        """,
    )
    user = toy.load("user")
    before, kept = snapshot(owner, user), id(owner.Plain)
    body = class_body(toy)
    applied = toy.commit(toy.patch("Plain", "replace", body))
    assert owner.Plain is user.P is user.table["p"] is user.use() is body
    applied.revert()
    assert snapshot(owner, user) == before
    assert id(user.table["p"]) == id(user.use()) == kept


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from {toy}.owner import Plain\nclass Sub(Plain): pass", "class .*user.Sub"),
        ("from {toy}.owner import Plain\nmade = Plain()", "an instance of .*owner.Plain"),
        (
            "from {toy}.owner import Plain\nfrom dataclasses import dataclass\n@dataclass\n"
            "class Sub(Plain):\n    x: int = 1",
            "class .*user.Sub",
        ),
    ],
)
def test_subclasses_and_instances_of_a_replaced_class_are_named(
    toy: Toy, owner: types.ModuleType, source: str, name: str
) -> None:
    toy.write("user", source)
    user = toy.load("user")
    before = snapshot(owner, user)
    with pytest.raises(PatchError, match=name):
        toy.commit(toy.patch("Plain", "replace", class_body(toy)))
    assert snapshot(owner, user) == before
    applied = toy.commit(toy.patch("Plain", "replace", class_body(toy)), strict=False)
    assert applied.report().unrebindable


def test_a_replacement_may_inherit_from_what_it_replaces(toy: Toy, owner: types.ModuleType) -> None:
    name = f"{toy.name}.owner"
    body = type("C", (owner.C,), {"__module__": name, "m": lambda self: "patched"})
    applied = toy.commit(toy.patch("C", "replace", body))
    assert owner.C().m() == "patched" and owner.C().s() == "original"
    applied.revert()
    assert owner.C().m() == "original"


def test_methods_of_a_class_reach_subclasses_made_before(toy: Toy, owner: types.ModuleType) -> None:
    toy.write(
        "user",
        """
        from dataclasses import dataclass
        from {toy}.owner import C
        @dataclass
        class Sub(C):
            x: int = 1
        made = Sub()
        """,
    )
    user = toy.load("user")
    toy.commit(toy.patch("C.m", "wrap", lambda original, self: ("patched", self.x)))
    assert user.made.m() == ("patched", 1)


def test_a_value_from_elsewhere_is_rebound_in_the_package_only(toy: Toy, tmp_path: Path) -> None:
    toy.write("owner", "from os.path import basename\ncompile_it = basename\n")
    toy.write("user", "from {toy}.owner import compile_it as fuse\n")
    owner, user = toy.load(), toy.load("user")
    import os.path
    import posixpath

    applied = toy.commit(toy.patch("compile_it", "value", lambda original: len))
    assert owner.compile_it is len and user.fuse is len
    assert os.path.basename is posixpath.basename is not len
    applied.revert()
    assert user.fuse is owner.compile_it is posixpath.basename


def test_a_value_that_is_bound_later_is_given_back(toy: Toy) -> None:
    toy.write("owner", "from os.path import basename\ncompile_it = basename\n")
    toy.write("user", "from {toy}.owner import compile_it as fuse\ntable = {}\n")
    applied = toy.commit(toy.patch("compile_it", "value", lambda original: sorted))
    user = toy.load("user")
    assert user.fuse is sorted
    applied.revert()
    import posixpath

    assert user.fuse is posixpath.basename
    assert sorted([2, 1]) == [1, 2]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "statement",
    ["from {toy}.owner import FLAG", "from {toy}.owner import FLAG as HERE", "from .owner import FLAG"],
)
def test_a_plain_value_is_rebound_where_it_was_imported(toy: Toy, statement: str, early: bool) -> None:
    toy.write("owner", OWNER)
    toy.write("user", statement + "\nOTHER = False\n")
    toy.write("bystander", "FLAG = False\n")
    if early:
        toy.load("user")
    bystander = toy.load("bystander")
    applied = toy.commit(toy.patch("FLAG", "value", lambda original: True))
    user = toy.load("user")
    name = "HERE" if "HERE" in statement else "FLAG"
    assert getattr(user, name) is True
    assert user.OTHER is False and bystander.FLAG is False, "equal values of others mean nothing"
    applied.revert()
    assert getattr(user, name) is False and toy.load().FLAG is False


CHAINS = {
    "re-exported": {
        "one": "from {toy}.owner import compile_it as x\n",
        "user": "from {toy}.one import x as fuse\n",
    },
    "by a package": {
        "sub.__init__": "from ..owner import *\n",
        "user": "from .sub import compile_it as fuse\n",
    },
    "starred": {"one": "from {toy}.owner import *\n", "user": "from .one import *\nfuse = compile_it\n"},
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("new", [sorted, "text"], ids=["callable", "atom"])
def test_a_value_that_others_hold_too_is_followed_by_its_imports(
    toy: Toy, chain: str, new: Any, early: bool
) -> None:
    toy.write("owner", "compile_it = len\n" if callable(new) else "compile_it = 'before'\n")
    toy.write("bystander", f"own, compile_it = {new.__name__ if callable(new) else repr(new)}, 1\n")
    for name, source in CHAINS[chain].items():
        toy.write(name, source)
    old, bystander = toy.load().compile_it, toy.load("bystander")
    if early:
        toy.load("user")
    applied = toy.commit(toy.patch("compile_it", "value", lambda original: new))
    user = toy.load("user")
    name = "compile_it" if chain == "starred" else "fuse"
    assert getattr(user, name) is new
    applied.revert()
    assert getattr(user, name) is old is toy.load().compile_it
    assert bystander.own is new and bystander.compile_it == 1


def test_two_targets_that_are_one_object_are_a_conflict(toy: Toy) -> None:
    toy.write("owner", OWNER + "\ng = f\n")
    owner = toy.load()
    with pytest.raises(PatchConflictError, match="are one object"):
        toy.commit(replace_f(toy), toy.patch("g", "value", lambda original: patched))
    assert owner.f() == owner.g() == "original"


def test_modules_under_two_names_are_rebound_once(toy: Toy, owner: types.ModuleType) -> None:
    toy.write("user", "from {toy}.owner import f")
    user = toy.load("user")
    sys.modules[f"{toy.name}.again"] = user
    applied = toy.commit(replace_f(toy))
    assert user.f() == "patched"
    applied.revert()
    assert user.f() == "original"


def test_objects_that_are_no_modules_in_sys_modules_do_no_harm(toy: Toy, owner: types.ModuleType) -> None:
    sys.modules[f"{toy.name}.odd"] = 3  # type: ignore[assignment]
    sys.modules[f"{toy.name}.none"] = None  # type: ignore[assignment]
    applied = toy.commit(replace_f(toy))
    assert owner.f() == "patched"
    applied.revert()


def test_a_lazy_attribute_is_not_woken(toy: Toy, owner: types.ModuleType) -> None:
    toy.write(
        "user",
        """
        from {toy}.owner import f
        class Lazy:
            def __getattr__(self, name):
                raise AssertionError(name)
        lazy = Lazy()
        vars(lazy)["call"] = f
        """,
    )
    user = toy.load("user")
    applied = toy.commit(replace_f(toy))
    assert vars(user.lazy)["call"]() == "patched"
    applied.revert()


def test_a_late_patch_rebinds_who_bound_the_name_in_a_circular_import(toy: Toy) -> None:
    toy.write("owner", "def f(): return 'original'\nimport {toy}.user\ndef g(): return 'original'\n")
    toy.write("user", "from {toy}.owner import f\ntable = {'f': f}\ndef use(call=f): return call()\n")
    applied = toy.commit(replace_f(toy), toy.patch("g", "wrap", lambda original: "patched"))
    owner, user = toy.load(), toy.load("user")
    assert [owner.f(), owner.g(), user.f(), user.table["f"](), user.use()] == ["patched"] * 5
    applied.revert()
    assert [owner.f(), owner.g(), user.f(), user.table["f"](), user.use()] == ["original"] * 5


def test_a_late_patch_that_cannot_rebind_fails_the_import(toy: Toy) -> None:
    toy.write("owner", OWNER + "\nfrom collections import deque\nd = deque([f])\n")
    applied = toy.commit(replace_f(toy))
    with pytest.raises(PatchImportError, match="cannot be rebound: .*owner:f .*deque"):
        toy.load()
    assert not applied.active
    assert toy.load().f() == "original"


@pytest.mark.parametrize(
    "statement",
    [
        "from {toy}.owner import FLAG",
        "from  {toy}.owner  import  FLAG  as  FLAG",
        "from {toy}.owner import (FLAG)",
        "from {toy}.owner import (\n    f,  # a, comment\n    FLAG,\n)",
        "from {toy}.owner import f, \\\n    FLAG",
        "from {toy}.owner import f, FLAG # FLAG is a flag",
        "import os; from {toy}.owner import FLAG; x = 1",
        "if True:\n    from {toy}.owner import FLAG",
        "try:\n    from .owner import FLAG\nexcept ImportError: FLAG = False",
        "from .owner import f\nfrom .owner import FLAG",
        "from {toy}.owner import *",
    ],
)
def test_any_way_to_write_the_import_is_understood(toy: Toy, statement: str) -> None:
    toy.write("owner", OWNER)
    toy.write("user", statement + "\n")
    user = toy.load("user")
    applied = toy.commit(toy.patch("FLAG", "value", lambda original: True))
    assert user.FLAG is True
    applied.revert()
    assert user.FLAG is False


def test_a_module_whose_source_is_gone_is_left_alone(toy: Toy) -> None:
    toy.write("owner", OWNER)
    path = toy.write("user", "from .owner import FLAG\n")
    user = toy.load("user")
    path.unlink()
    toy.commit(toy.patch("FLAG", "value", lambda original: True))
    assert user.FLAG is False and toy.load().FLAG is True
