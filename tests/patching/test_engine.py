"""All or nothing, in any order, as often as one likes; and back to exactly what was there."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
import types
from typing import Any

import pytest

from mt_megatron.errors import PatchError, PatchImportError
from mt_megatron.patching.engine import AppliedPlan
from mt_megatron.patching.spec import Patch

from .conftest import Toy, snapshot

OWNERS = {
    "first": "def f(): return 'f'\nclass A:\n    def m(self): return 'm'\n"
    "    @staticmethod\n    def s(): return 's'\n",
    "second": "def g(): return 'g'\nLIMIT = 1\n",
    "third": "def h(device='cuda'): return 'cuda'\nclass B:\n    @property\n    def p(self): return 'p'\n",
}
USER = """
from {toy}.first import f, A
from {toy}.second import g as gg, LIMIT
from {toy}.third import h, B
table = {"f": f, "pair": (gg, h)}
def use(call=f, *, other=gg): return call() + other()
class Sub(A):
    own = f
    box = staticmethod(gg)
"""


@pytest.fixture
def toy(toy: Toy) -> Toy:
    for name, source in OWNERS.items():
        toy.write(name, source)
    toy.write("user", USER)
    return toy


def loud(original: Any, *args: Any) -> Any:
    return str(original(*args)).upper()


def patches(toy: Toy) -> list[Patch]:
    return [
        toy.patch("f", "wrap", loud, module="first", id="1"),
        toy.patch("A.m", "wrap", loud, module="first", id="2"),
        toy.patch("A.s", "replace", lambda: "S", module="first", id="3"),
        toy.patch("g", "replace", lambda: "G", module="second", id="4"),
        toy.patch("LIMIT", "value", lambda original: original + 1, module="second", id="5"),
        toy.patch("h", "constant", {"cuda": "CPU"}, module="third", id="6"),
        toy.patch("B.p", "wrap", loud, module="third", id="7"),
        toy.patch("B.more", "add", lambda self: "MORE", module="third", id="8"),
        toy.patch("h", "wrap", lambda original, device="cuda": original() + "!", module="third", id="9"),
    ]


def behaviour(toy: Toy) -> dict[str, Any]:
    user = toy.load("user")
    first, second, third = (toy.load(name) for name in OWNERS)
    return {
        "f": (first.f(), user.f(), user.table["f"](), vars(user.Sub)["own"]()),
        "A": (first.A().m(), user.Sub().m(), first.A.s(), user.Sub().s()),
        "g": (second.g(), user.gg(), user.table["pair"][0](), user.Sub.box()),
        "LIMIT": (second.LIMIT, user.LIMIT),
        "h": (third.h(), user.h(), user.table["pair"][1]()),
        "B": (third.B().p, hasattr(user.B, "more")),
        "use": user.use(),
    }


PLAIN = {
    "f": ("f",) * 4,
    "A": ("m", "m", "s", "s"),
    "g": ("g",) * 4,
    "LIMIT": (1, 1),
    "h": ("cuda",) * 3,
    "B": ("p", False),
    "use": "fg",
}
PATCHED = {
    "f": ("F",) * 4,
    "A": ("M", "M", "S", "S"),
    "g": ("G",) * 4,
    "LIMIT": (2, 2),
    "h": ("CPU!",) * 3,
    "B": ("P", True),
    "use": "FG",
}
MODULES = ("first", "second", "third", "user")


@pytest.mark.parametrize("imports", list(itertools.product(["before", "after"], repeat=4)))
def test_every_mix_of_modules_imported_before_and_after(toy: Toy, imports: tuple[str, ...]) -> None:
    declared = patches(toy)
    for name, when in zip(MODULES, imports, strict=True):
        if when == "before":
            toy.load(name)
    applied = toy.commit(*declared)
    for name in MODULES:
        toy.load(name)
    assert behaviour(toy) == PATCHED
    assert not applied.report().pending and not applied.report().unrebindable
    applied.revert()
    assert behaviour(toy) == PLAIN


def loaded_snapshot(toy: Toy) -> dict[Any, int]:
    return snapshot(*(module for name, module in sys.modules.items() if name.startswith(toy.name + ".")))


def test_patch_revert_patch_revert(toy: Toy) -> None:
    toy.load("user")
    before, finders = loaded_snapshot(toy), list(sys.meta_path)
    for _ in range(4):
        applied = toy.commit(*patches(toy))
        assert behaviour(toy) == PATCHED
        applied.revert()
        assert behaviour(toy) == PLAIN
        assert loaded_snapshot(toy) == before and sys.meta_path == finders


def test_a_revert_before_anything_was_imported(toy: Toy) -> None:
    finders = list(sys.meta_path)
    toy.commit(*patches(toy)).revert()
    assert sys.meta_path == finders and behaviour(toy) == PLAIN


def test_reverting_twice_is_reverting_once(toy: Toy) -> None:
    toy.load("user")
    applied = toy.commit(*patches(toy))
    assert applied.revert() == [] == applied.revert()
    assert behaviour(toy) == PLAIN and not applied.active


@pytest.mark.parametrize("position", range(10))
@pytest.mark.parametrize("early", [True, False])
def test_a_failure_at_any_position_leaves_nothing(toy: Toy, position: int, early: bool) -> None:
    for name in MODULES:
        toy.load(name)
    before, finders = loaded_snapshot(toy), list(sys.meta_path)
    code = toy.load("third").h.__code__
    if not early:
        for name in MODULES:
            del sys.modules[f"{toy.name}.{name}"]
    declared = patches(toy)
    bad = toy.patch("B", "value", lambda original: original.nothing, module="third", id="bad")
    declared = [one for one in declared if not one.target.partition(":")[2].startswith("B")]
    declared.insert(min(position, len(declared)), bad)
    if early:
        with pytest.raises(PatchError, match="patch bad of .*third:B failed: AttributeError"):
            toy.commit(*declared)
        assert loaded_snapshot(toy) == before
        assert toy.load("third").h.__code__ is code
    else:
        toy.commit(*declared)
        with pytest.raises(PatchImportError, match="patch bad of .*third:B failed: AttributeError"):
            toy.load("user")
    assert sys.meta_path == finders
    assert behaviour(toy) == PLAIN


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("name 'f' of module", lambda m: setattr(m["first"], "f", None)),
        ("attribute 'm' of class", lambda m: setattr(m["first"].A, "m", None)),
        ("attribute 's' of class", lambda m: setattr(m["first"].A, "s", None)),
        ("name 'gg' of module", lambda m: setattr(m["user"], "gg", None)),
        ("name 'gg' of module", lambda m: delattr(m["user"], "gg")),
        ("name 'LIMIT' of module", lambda m: setattr(m["second"], "LIMIT", 7)),
        ("the code of", lambda m: setattr(m["third"].h.__wrapped__, "__code__", (lambda d=1: 1).__code__)),
        ("a default argument of", lambda m: setattr(m["user"].use, "__defaults__", (len,))),
        ("value of key 'other'", lambda m: m["user"].use.__kwdefaults__.update(other=None)),
        ("value of key 'f'", lambda m: m["user"].table.update(f=None)),
        ("attribute 'more' of class", lambda m: delattr(m["third"].B, "more")),
    ],
)
def test_revert_refuses_what_somebody_else_changed(toy: Toy, what: str, change: Any) -> None:
    toy.load("user")
    applied = toy.commit(*patches(toy))
    modules = {name: toy.load(name) for name in MODULES}
    change(modules)
    before, finders = loaded_snapshot(toy), list(sys.meta_path)
    with pytest.raises(PatchError, match=f"cannot unpatch, nothing was changed: .*{what}"):
        applied.revert()
    assert loaded_snapshot(toy) == before and sys.meta_path == finders
    assert applied.active
    left = applied.roll_back()
    assert len(left) == 1 and what.split(" of ")[0] in left[0]
    assert not applied.active


def test_revert_works_again_when_the_change_is_undone(toy: Toy) -> None:
    first = toy.load("first")
    applied = toy.commit(*patches(toy))
    ours, first.f = first.f, None
    with pytest.raises(PatchError, match="undo that change first"):
        applied.revert()
    first.f = ours
    applied.revert()
    assert behaviour(toy) == PLAIN


def test_what_was_taken_out_of_a_container_stays_out(toy: Toy) -> None:
    user = toy.load("user")
    applied = toy.commit(*patches(toy))
    del user.table["f"]
    applied.revert()
    assert set(user.table) == {"pair"} and user.table["pair"][0]() == "g"


def test_what_moved_in_a_list_is_found(toy: Toy) -> None:
    toy.write("user", "from {toy}.first import f\nitems = [f, 1]\nseen = {f}\n")
    user = toy.load("user")
    applied = toy.commit(toy.patch("f", "wrap", loud, module="first"))
    user.items.insert(0, 0)
    applied.revert()
    assert user.items == [0, toy.load("first").f, 1] and user.seen == {toy.load("first").f}


def test_a_patch_on_top_by_hand_and_off_again(toy: Toy) -> None:
    """Last in, first out, whoever is last."""
    first = toy.load("first")
    applied = toy.commit(*patches(toy))
    ours = first.f
    first.f = lambda: "theirs"
    with pytest.raises(PatchError):
        applied.revert()
    assert first.f() == "theirs"
    first.f = ours
    applied.revert()
    assert first.f() == "f"


def test_a_target_without_a_class_around_it(toy: Toy) -> None:
    toy.write("first", "class A:\n    def m(self): ...\n")
    patch = toy.patch("A.m", "wrap", loud, module="first", id="lost")
    toy.load("first").A = 3
    with pytest.raises(PatchError, match="lost.*has no class around it, but 3"):
        toy.commit(patch)


@pytest.mark.parametrize("seed", range(30))
def test_any_history_of_imports_commits_and_reverts(toy: Toy, seed: int) -> None:
    """A random walk: after every step each imported module behaves as the state says."""
    chance = random.Random(seed)
    applied: AppliedPlan | None = None
    for _ in range(14):
        action = chance.choice(["load", "load", "toggle", "toggle", "reload", "check"])
        name = chance.choice(MODULES)
        if action == "load":
            toy.load(name)
        elif action == "reload" and f"{toy.name}.{name}" in sys.modules and name == "user":
            importlib.reload(toy.load(name))
        elif action == "toggle" and applied is None:
            some = patches(toy)
            applied = toy.commit(*some)
        elif action == "toggle" and applied is not None:
            applied.revert()
            applied = None
        elif action == "check":
            assert behaviour(toy) == (PLAIN if applied is None else PATCHED)
    assert behaviour(toy) == (PLAIN if applied is None else PATCHED)
    if applied is not None:
        applied.revert()
    assert behaviour(toy) == PLAIN


@pytest.mark.parametrize("seed", range(12))
def test_any_subset_of_patches_reverts_exactly(toy: Toy, seed: int) -> None:
    chance = random.Random(seed)
    for name in MODULES:
        toy.load(name)
    before = loaded_snapshot(toy)
    some = [one for one in patches(toy) if chance.random() < 0.6]
    applied = toy.commit(*some)
    assert (loaded_snapshot(toy) == before) is (not [one for one in some if one.kind != "constant"])
    applied.revert()
    assert loaded_snapshot(toy) == before and behaviour(toy) == PLAIN


def test_patches_of_a_plan_do_not_share_state_between_commits(toy: Toy) -> None:
    declared = patches(toy)
    toy.load("user")
    for _ in range(2):
        applied = toy.commit(*declared)
        assert behaviour(toy) == PATCHED
        applied.revert()


def test_no_module_is_kept_alive_after_revert(toy: Toy) -> None:
    import gc
    import weakref

    applied = toy.commit(*patches(toy))
    reference = weakref.ref(toy.load("first"))
    assert isinstance(reference(), types.ModuleType)
    applied.revert()
    for name in MODULES:
        sys.modules.pop(f"{toy.name}.{name}", None)
    vars(sys.modules[toy.name]).pop("first")
    gc.collect()
    assert reference() is None
