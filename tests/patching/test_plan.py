"""A plan is selected, ordered and checked from source files, and nothing else happens."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from mt_megatron.errors import PatchConflictError, PatchError, PatchTargetError
from mt_megatron.patching import plan as plan_module
from mt_megatron.patching.plan import (
    Plan,
    Settings,
    find_problems,
    make_plan,
    select_patches,
    suggest,
    within,
)
from mt_megatron.patching.spec import Kind, Patch

from .conftest import Toy

OWNER = """
raise AssertionError("a plan imports nothing")

def f(a, b=1, *, c=2):
    return 'cuda'

def g(*args, **kwargs): ...

class C:
    x = 1
    def m(self, a): ...
    @staticmethod
    def s(a): ...
    @property
    def p(self): ...

class D(C): ...

FLAG = False
from os import path as imported
"""


@pytest.fixture
def owner(toy: Toy) -> Toy:
    toy.write("owner", OWNER)
    return toy


def ids(plan: Plan) -> list[str]:
    return [step.patch.id for step in plan.steps]


def wrap(toy: Toy, id: str, **options: Any) -> Patch:
    return toy.patch(
        "f", "wrap", lambda original, *args, **kwargs: original(*args, **kwargs), id=id, **options
    )


def test_a_plan_imports_nothing(owner: Toy) -> None:
    found = make_plan(
        [
            wrap(owner, "w"),
            owner.patch("C.m", "replace", lambda self, a: None),
            owner.patch("C.new", "add", lambda self: None),
            owner.patch("FLAG", "value", lambda original: True),
            owner.patch("C.s", "constant", {1: 2}),
            owner.patch("", "rebind", lambda original: original, scope=("x",)),
        ],
        backend="cpu",
    )
    assert len(found.steps) == 6
    assert not [name for name in sys.modules if name.startswith(owner.name)]


def test_selects_by_backend(owner: Toy) -> None:
    both = [
        wrap(owner, "all"),
        wrap(owner, "gpu", backends=frozenset({"musa", "cuda"})),
        wrap(owner, "cpu", backends=frozenset({"cpu"})),
    ]
    found = make_plan(both, backend="cpu")
    assert ids(found) == ["all", "cpu"]
    ((left, why),) = found.left_out
    assert left.id == "gpu" and why == "is for backend cuda or musa, this is cpu"


def test_selects_by_feature(owner: Toy) -> None:
    both = [wrap(owner, "one", feature="one"), wrap(owner, "two", feature="two")]
    found = make_plan(both, backend="cpu", features=["two"])
    assert ids(found) == ["two"]
    assert found.left_out[0][1] == "feature 'one' was not asked for"
    assert ids(make_plan(both, backend="cpu")) == ["one", "two"]
    assert ids(make_plan(both, backend="cpu", features=[])) == []


def test_an_unknown_feature_is_an_error_with_a_suggestion(owner: Toy) -> None:
    with pytest.raises(PatchError, match="no patch has the feature 'devise'.*did you mean 'device'"):
        make_plan([wrap(owner, "w", feature="device")], backend="cpu", features=["devise"])


def test_a_string_is_no_list_of_features(owner: Toy) -> None:
    with pytest.raises(PatchError, match="is one string"):
        make_plan([wrap(owner, "w", feature="device")], backend="cpu", features="device")


@pytest.mark.parametrize(
    ("wanted", "found", "inside"),
    [
        (">=2.7", "2.13.0+cpu", True),
        (">=2.7,<2.14", "2.13.0+cpu", True),
        ("<2.13", "2.13.0+cpu", False),
        (">=2.7", "2.6.9", False),
        (">=2", "2.0.0rc1", False),
        (">=1,<3", "2.0.0rc1", True),
        ("==0.9.0", "0.9.0", True),
    ],
)
def test_version_ranges(wanted: str, found: str, inside: bool) -> None:
    assert within(found, wanted) is inside


def test_selects_by_installed_versions(owner: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "installed_version", {"lib": "2.1"}.get)
    patches = [
        wrap(owner, "in", requires={"lib": ">=2"}),
        wrap(owner, "out", requires={"lib": ">=3"}),
        wrap(owner, "missing", requires={"lib": ">=2", "other": ">=1"}),
    ]
    selected, left_out = select_patches(patches, "cpu", None)
    assert [patch.id for patch in selected] == ["in"]
    assert [why for _, why in left_out] == [
        "needs lib >=3, found 2.1",
        "needs other >=1, which is not installed",
    ]


def test_what_is_left_out_is_not_checked(owner: Toy) -> None:
    wrong = owner.patch("nowhere", "value", lambda original: 1, backends=frozenset({"musa"}))
    assert make_plan([wrong], backend="cpu").steps == ()


def test_keeps_the_given_order_where_nothing_else_is_said(owner: Toy) -> None:
    names = [f"p{index}" for index in range(9)]
    random.Random(1).shuffle(names)
    assert ids(make_plan([wrap(owner, name) for name in names], backend="cpu")) == names


@pytest.mark.parametrize("seed", range(25))
def test_any_order_respects_the_edges(owner: Toy, seed: int) -> None:
    chance = random.Random(seed)
    names = [f"p{index}" for index in range(8)]
    edges = {
        name: tuple(earlier for earlier in names[:index] if chance.random() < 0.3)
        for index, name in enumerate(names)
    }
    patches = [wrap(owner, name, after=edges[name]) for name in names]
    chance.shuffle(patches)
    found = ids(make_plan(patches, backend="cpu"))
    assert sorted(found) == sorted(names)
    for name, earlier in edges.items():
        assert all(found.index(one) < found.index(name) for one in earlier)


def test_an_edge_to_a_patch_that_is_left_out_is_no_edge(owner: Toy) -> None:
    patches = [
        wrap(owner, "later", after=("absent",)),
        wrap(owner, "absent", backends=frozenset({"musa"})),
    ]
    assert ids(make_plan(patches, backend="cpu")) == ["later"]


def test_an_edge_to_nobody_is_an_error(owner: Toy) -> None:
    with pytest.raises(PatchError, match="comes after 'frist'.*did you mean 'first'"):
        make_plan([wrap(owner, "first"), wrap(owner, "second", after=("frist",))], backend="cpu")


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_cycle_is_an_error_that_shows_it(owner: Toy, length: int) -> None:
    names = [f"p{index}" for index in range(length)]
    patches = [wrap(owner, name, after=(names[index - 1],)) for index, name in enumerate(names)]
    with pytest.raises(PatchError, match="form a cycle: p0 ->"):
        make_plan([wrap(owner, "innocent"), *patches], backend="cpu")


def test_two_patches_of_one_id_are_an_error(owner: Toy) -> None:
    with pytest.raises(PatchError, match="two patches have the id 'w'"):
        make_plan([wrap(owner, "w"), wrap(owner, "w")], backend="cpu")


def of_kind(toy: Toy, kind: Kind, id: str) -> Patch:
    bodies: dict[str, Any] = {
        "wrap": lambda original, *args, **kwargs: None,
        "replace": lambda a, b=1, *, c=2: None,
        "value": lambda original: original,
        "constant": {"cuda": "cpu"},
        "rebind": lambda original: original,
    }
    options: dict[str, Any] = {"scope": ("x",)} if kind == "rebind" else {}
    return toy.patch("f", kind, bodies[kind], id=id, **options)


COMPOSE = {("wrap", "wrap"), ("replace", "wrap"), ("value", "wrap"), ("constant", "wrap")}
KINDS: tuple[Kind, ...] = ("wrap", "replace", "value", "constant", "rebind")


@pytest.mark.parametrize(("first", "second"), list(itertools.product(KINDS, KINDS)))
def test_which_kinds_compose_on_one_target(owner: Toy, first: Kind, second: Kind) -> None:
    patches = [of_kind(owner, first, "first"), of_kind(owner, second, "second")]
    if (first, second) in COMPOSE:
        assert ids(make_plan(patches, backend="cpu")) == ["first", "second"]
        return
    with pytest.raises(PatchConflictError, match="first.*second"):
        make_plan(patches, backend="cpu")


def test_a_wrap_in_front_of_a_replacement_is_told_how_to_go_behind(owner: Toy) -> None:
    wrapping = of_kind(owner, "wrap", "early")
    with pytest.raises(PatchConflictError, match=r"give early after=\('whole',\)"):
        make_plan([wrapping, of_kind(owner, "replace", "whole")], backend="cpu")
    later = wrap(owner, "early", after=("whole",))
    assert ids(make_plan([later, of_kind(owner, "replace", "whole")], backend="cpu")) == ["whole", "early"]


def test_rebinds_of_separate_scopes_compose(owner: Toy) -> None:
    def one(scope: str) -> Patch:
        return owner.patch("f", "rebind", lambda original: 1, id=scope, scope=(scope,))

    assert make_plan([one("a.b"), one("a.c"), one("ab")], backend="cpu").steps
    with pytest.raises(PatchConflictError, match="a.b"):
        make_plan([one("a.b"), one("a")], backend="cpu")


@pytest.mark.parametrize("kind", ["replace", "value"])
def test_a_class_is_not_replaced_and_patched_inside(owner: Toy, kind: Kind) -> None:
    body = type("C", (), {"__module__": f"{owner.name}.owner", "__qualname__": "C"})
    whole = owner.patch("C", kind, body, id="whole")
    inner = owner.patch("C.m", "wrap", lambda original, self, a: None, id="inner")
    for patches in ([whole, inner], [inner, whole]):
        with pytest.raises(PatchConflictError, match="inner.*whole"):
            make_plan(patches, backend="cpu")


def body_for(signature: str) -> Callable[..., Any]:
    found: dict[str, Any] = {}
    exec(f"def body({signature}): ...", found)
    return found["body"]  # type: ignore[no-any-return]


FITS = ["a, b=1, *, c=2", "a, b=9, *, c=9, more=1", "*args, **kwargs", "a, *args, **kwargs", "a, b=1, c=2"]
MISFITS = [
    ("", "too many positional"),
    ("a, *, c=2", "too many positional"),
    ("a, b, *, c=2", "missing a required argument: 'b'"),
    ("a, b=1", "unexpected keyword argument 'c'"),
    ("a, b=1, *, c", "missing a required (keyword-only )?argument: 'c'"),
    ("a, b=1, *, c=2, d", "missing a required (keyword-only )?argument: 'd'"),
    ("b=1, a=1, *, c=2", "gives upstream's 'a' to the body's 'b'"),
    ("x, b=1, *, c=2", "missing a required argument: 'x'|unexpected keyword argument 'a'"),
    ("a, b=1, /, *, c=2", "a|b"),
    ("*args, c=2", "unexpected keyword argument 'a'"),
    ("a, **kwargs", "too many positional"),
]


@pytest.mark.parametrize("signature", FITS)
def test_bodies_that_fit(owner: Toy, signature: str) -> None:
    assert make_plan([owner.patch("f", "replace", body_for(signature))], backend="cpu").steps
    assert make_plan([owner.patch("f", "wrap", body_for(f"original, {signature}"))], backend="cpu").steps


@pytest.mark.parametrize(("signature", "message"), MISFITS)
@pytest.mark.parametrize("kind", ["wrap", "replace"])
def test_bodies_that_do_not_fit(owner: Toy, kind: Kind, signature: str, message: str) -> None:
    signature = f"original, {signature}" if kind == "wrap" else signature
    with pytest.raises(PatchTargetError, match=message) as caught:
        make_plan([owner.patch("f", kind, body_for(signature), id="misfit")], backend="cpu")
    assert "misfit" in str(caught.value) and "owner.py:4" in str(caught.value)


def test_a_wrap_takes_the_original(owner: Toy) -> None:
    with pytest.raises(PatchTargetError, match="fits upstream but not the body"):
        make_plan([owner.patch("C.s", "wrap", lambda: None)], backend="cpu")


def test_variadic_targets_need_variadic_bodies(owner: Toy) -> None:
    assert make_plan([owner.patch("g", "replace", lambda *a, **k: None)], backend="cpu").steps
    for body in (lambda *a: None, lambda **k: None, lambda a: None):
        with pytest.raises(PatchTargetError, match="fits upstream but not the body"):
            make_plan([owner.patch("g", "replace", body)], backend="cpu")


def test_a_methods_receiver_may_have_another_name(owner: Toy) -> None:
    assert make_plan([owner.patch("C.m", "replace", lambda this, a: None)], backend="cpu").steps
    assert make_plan([owner.patch("C.m", "wrap", lambda original, me, a: None)], backend="cpu").steps


@pytest.mark.parametrize(
    ("qualname", "kind", "body", "options", "message"),
    [
        ("nothing", "value", lambda original: 1, {}, "does not define 'nothing'"),
        ("C.nothing", "wrap", lambda original, self: 1, {"digest": "x"}, "does not define 'C.nothing'"),
        ("D.m", "wrap", lambda original, self, a: 1, {"digest": "x"}, "does not define 'D.m'"),
        ("f", "wrap", lambda original, *a, **k: 1, {"digest": None}, "the installed one is [0-9a-f]{64}"),
        ("f", "wrap", lambda original, *a, **k: 1, {"digest": ""}, "the installed one is [0-9a-f]{64}"),
        ("f", "replace", lambda a, b=1, *, c=1: 1, {"digest": None}, "a replace states the digest"),
        ("f", "constant", {"cuda": "cpu"}, {"digest": None}, "a constant states the digest"),
        ("f", "constant", {}, {}, "maps literals to literals"),
        ("f", "constant", lambda original: 1, {}, "maps literals to literals"),
        ("C", "constant", {1: 2}, {}, "is no function"),
        ("FLAG", "constant", {False: True}, {}, "is no function"),
        ("C", "wrap", lambda original, *a: 1, {}, "is a class; wrap its methods"),
        ("imported", "wrap", lambda original, *a: 1, {}, "only imported there, from os:path"),
        ("imported", "replace", lambda *a: 1, {}, "only imported there, from os:path"),
        ("f", "replace", type("f", (), {}), {}, "the body is a type, the target a function"),
        ("C", "replace", lambda: 1, {}, "the body is a function, the target a class"),
        ("C", "replace", type("Other", (), {}), {}, "pickle would look for the class as"),
        ("f", "value", 3, {}, "the body of a value is called, but it is 3"),
        ("f", "wrap", None, {}, "the body of a wrap is called, but it is None"),
        ("f", "add", lambda: 1, {}, "is already defined, in .*owner.py:4"),
        ("C.m", "add", lambda: 1, {}, "is already defined"),
        ("f.inner", "add", lambda: 1, {}, "is no class, so nothing can be added"),
        ("Nope.m", "add", lambda: 1, {}, "does not define 'Nope'"),
        ("", "value", lambda original: 1, {}, "which only a rebind and a module can target"),
        ("f", "wrap", lambda original, *a, **k: 1, {"scope": ("x",)}, "scope belongs to a rebind"),
        ("f", "rebind", lambda original: 1, {}, "a rebind needs one"),
    ],
)
def test_what_cannot_be_applied_is_refused(
    owner: Toy, qualname: str, kind: Kind, body: Any, options: dict[str, Any], message: str
) -> None:
    patch = owner.patch(qualname, kind, body, id="wrong", **options)
    with pytest.raises(PatchTargetError, match=message) as caught:
        make_plan([patch], backend="cpu")
    assert "wrong" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "kind", "message"),
    [
        ("nowhere", "value", "no module"),
        ("nowhere", "rebind", "no module"),
        ("nowhere", "add", "no module"),
        ("owner.deeper", "value", "is not a package"),
    ],
)
def test_a_module_that_does_not_exist_is_refused(owner: Toy, module: str, kind: Kind, message: str) -> None:
    options: dict[str, Any] = {"scope": ("x",)} if kind == "rebind" else {}
    with pytest.raises(PatchTargetError, match=message):
        make_plan([owner.patch("f", kind, lambda original: 1, module=module, **options)], backend="cpu")


def test_a_target_that_is_not_module_colon_name_is_refused() -> None:
    patch = Patch(id="odd", target="module.name", kind="value", reason="a test", body=len)
    with pytest.raises(PatchTargetError, match="odd.*is not a patch target"):
        make_plan([patch], backend="cpu")


def test_a_class_under_the_targets_name_may_take_its_place(owner: Toy) -> None:
    body = type("C", (), {"__module__": f"{owner.name}.owner"})
    assert make_plan([owner.patch("C", "replace", body)], backend="cpu").steps


def test_packages_of_many_versions_need_no_digest(owner: Toy) -> None:
    settings = Settings(unpinned=(owner.name,))
    for qualname, kind in (("f", "wrap"), ("D.m", "wrap"), ("imported.basename", "wrap"), ("D.m", "value")):
        patch = owner.patch(
            qualname, kind, lambda original, *args, **kwargs: 1, digest=None, id=f"{qualname}.{kind}"
        )
        assert make_plan([patch], backend="cpu", settings=settings).steps[0].patch is patch
        if kind == "wrap":
            with pytest.raises(PatchTargetError):
                make_plan([patch], backend="cpu")


def test_unpinned_targets_are_still_checked_where_they_can_be(owner: Toy) -> None:
    settings = Settings(unpinned=(owner.name,))
    misfit = owner.patch("f", "wrap", lambda original: 1, digest=None)
    with pytest.raises(PatchTargetError, match="fits upstream but not the body"):
        make_plan([misfit], backend="cpu", settings=settings)
    nowhere = owner.patch("f", "wrap", lambda original: 1, digest=None, module="nowhere")
    with pytest.raises(PatchTargetError, match="no module"):
        make_plan([nowhere], backend="cpu", settings=settings)


def test_the_first_problem_in_plan_order_is_raised(owner: Toy) -> None:
    wrong = [owner.patch(f"z{index}", "value", len, id=f"p{9 - index}") for index in range(3)]
    with pytest.raises(PatchTargetError, match="patch p9"):
        make_plan(wrong, backend="cpu")


def test_all_problems_can_be_listed(owner: Toy) -> None:
    wrong = [owner.patch(f"z{index}", "value", len, id=f"p{index}") for index in range(3)]
    found = find_problems([*wrong, wrap(owner, "fine")], backend="cpu", settings=Settings())
    assert [str(error).split(":")[0] for error in found] == ["patch p0", "patch p1", "patch p2"]
    twice = find_problems([wrap(owner, "w"), wrap(owner, "w")], backend="cpu", settings=Settings())
    assert [type(error) for error in twice] == [PatchError]
    assert find_problems([wrap(owner, "fine")], backend="cpu", settings=Settings()) == []


def test_the_plan_digest_tells_plans_apart(owner: Toy) -> None:
    first = make_plan([wrap(owner, "a"), wrap(owner, "b")], backend="cpu")
    assert first.digest == make_plan([wrap(owner, "a"), wrap(owner, "b")], backend="cpu").digest
    others = [
        make_plan([wrap(owner, "a"), wrap(owner, "b")], backend="musa"),
        make_plan([wrap(owner, "a")], backend="cpu"),
        make_plan([wrap(owner, "b"), wrap(owner, "a")], backend="cpu"),
    ]
    owner.write("owner", OWNER.replace("'cuda'", "'cpu'"))
    others.append(make_plan([wrap(owner, "a"), wrap(owner, "b")], backend="cpu"))
    assert len({first.digest, *(plan.digest for plan in others)}) == 5


def test_suggestions() -> None:
    assert suggest("devise", ["device", "norm"]) == "; did you mean 'device'?"
    assert suggest("zzz", ["device", "norm"]) == ""
