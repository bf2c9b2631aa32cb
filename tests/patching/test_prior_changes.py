"""Targets that other code changed before they were patched are refused or reported, and no others."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from mt_megatron.errors import PatchConflictError, PatchImportError
from mt_megatron.patching.engine import AppliedPlan, commit
from mt_megatron.patching.places import Attribute
from mt_megatron.patching.plan import Settings, make_plan

from .conftest import Toy, snapshot

OWNER = """
import contextlib, functools
def f(): return "original"
def g(): return "other"
def h(): return "third"
class C:
    def m(self): return "original"
    @staticmethod
    def s(): return "original"
    @property
    def p(self): return "original"
    @p.setter
    def p(self, value): ...
@contextlib.contextmanager
def managed(): yield "original"
def repeated(function):
    def twice(*args): return function(*args), function(*args)
    return twice
@repeated
def hidden(): return "original"
"""


@pytest.fixture
def owner(toy: Toy) -> ModuleType:
    toy.write("owner", OWNER)
    toy.write("user", "from {toy}.owner import C, f, managed\nclass D(C):\n    n = C.m\n")
    toy.load("user")
    return toy.load()


def tempered(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def outer(*args: Any) -> Any:
        return function(*args)

    return outer


def another(*args: Any) -> Any:
    return "another"


CHANGES: dict[str, tuple[str, Callable[[ModuleType], Any], str, str]] = {
    "wrapped": ("f", lambda o: setattr(o, "f", tempered(o.f)), "outer of .*prior_changes", "'f' of module"),
    "replaced": ("f", lambda o: setattr(o, "f", another), "another of ", "'f' of module"),
    "object": ("f", lambda o: setattr(o, "f", functools.partial(o.f)), "functools.partial", "'f' of module"),
    "exchanged": ("f", lambda o: setattr(o, "f", o.h), "h of toy", "'f' of module"),
    "method": ("C.m", lambda o: setattr(o.C, "m", tempered(o.C.m)), "outer of ", "'n' of class"),
    "static": ("C.s", lambda o: setattr(o.C, "s", staticmethod(tempered(another))), "outer of ", "no other"),
    "property": ("C.p", lambda o: setattr(o.C, "p", property(tempered(another))), "outer of ", "no other"),
    "decorated": (
        "managed",
        lambda o: setattr(o, "managed", tempered(o.managed)),
        "outer of ",
        "'managed' of",
    ),
    "no decorator": ("managed", lambda o: setattr(o, "managed", another), "another of ", "'managed' of"),
    "hidden": ("hidden", lambda o: setattr(o, "hidden", tempered(o.hidden)), "outer of ", "no other"),
    "class": ("C.m", lambda o: setattr(o, "C", type("E", (o.C,), {})), "class .*E;", "'n' of class"),
}


def patches(toy: Toy, name: str) -> list[Any]:
    body: Any = lambda original, *args: ("patched", original(*args))  # noqa: E731
    return [toy.patch("g", "wrap", body), toy.patch(name, "wrap", body)]


@pytest.mark.parametrize("change", CHANGES)
def test_strict_refuses_a_target_that_was_changed_before(toy: Toy, owner: ModuleType, change: str) -> None:
    name, apply, who, kept = CHANGES[change]
    apply(owner)
    before = snapshot(owner, toy.load("user"))
    if kept == "no other":
        applied = toy.commit(*patches(toy, name))
        (text,) = applied.report().warnings
        assert f"owner:{name} holds " in text and "upstream's own function has no other name" in text
        applied.revert()
        assert snapshot(owner, toy.load("user")) == before
        patch = toy.patch(name, "replace", another)
        with pytest.raises(PatchConflictError, match=f"owner:{name} holds .*{who}.*test.{name}.replace"):
            toy.commit(patch)
        assert snapshot(owner, toy.load("user")) == before
        return
    told = f"owner:{name} holds .*{who}.*upstream.*{kept}.*test.{name}.wrap"
    with pytest.raises(PatchConflictError, match=told):
        toy.commit(*patches(toy, name))
    assert snapshot(owner, toy.load("user")) == before


@pytest.mark.parametrize("change", CHANGES)
def test_without_strict_the_change_is_reported(toy: Toy, owner: ModuleType, change: str) -> None:
    name, apply, _, _ = CHANGES[change]
    apply(owner)
    before = snapshot(owner, toy.load("user"))
    applied = toy.commit(*patches(toy, name), strict=False)
    (text,) = applied.report().warnings
    assert text.startswith(f"{toy.name}.owner:{name} holds ") and f"(patch test.{name}.wrap (wrap))" in text
    assert owner.g() == ("patched", "other")
    applied.revert()
    assert snapshot(owner, toy.load("user")) == before


def test_a_name_that_was_bound_early_keeps_the_original(toy: Toy, owner: ModuleType) -> None:
    """The reason for the report: the patched function is not what ``user`` calls."""
    vars(owner)["f"] = tempered(owner.f)
    toy.commit(*patches(toy, "f"), strict=False)
    assert owner.f() == ("patched", "original") and toy.load("user").f() == "original"


def test_a_change_while_the_module_is_imported_fails_the_import(toy: Toy) -> None:
    toy.write("owner", OWNER + "import {toy}.other\n")
    toy.write(
        "other",
        "import {toy}.owner as o\nkept = o.f\ndef another(): return kept()\no.f = another\n",
    )
    applied = toy.commit(*patches(toy, "f"))
    with pytest.raises(PatchImportError, match="owner:f holds another of .*other .*'kept' of module"):
        toy.load()
    assert not applied.active


UPSTREAMS: dict[str, str] = {
    "plain": "def f(): return 1",
    "under a condition": "if True:\n    def f(): return 1\nelse:\n    def f(): return 2",
    "imported elsewhere": "try:\n    from os.path import basename as f\nexcept ImportError:\n"
    "    def f(): return 1",
    "in another branch": "f = len\nif f is None:\n    def f(): return 1",
    "assigned again": "def f(): return 1\nf = len",
    "with an attribute": "def f(): return 1\nf.warned = False",
    "a generator's manager": "import contextlib\n@contextlib.contextmanager\ndef f(): yield 1",
    "cached": "import functools\n@functools.lru_cache\ndef f(): return 1",
    "two decorators": "import functools, contextlib\n@functools.lru_cache\n@contextlib.contextmanager\n"
    "def f(): yield 1",
    "a decorator that hides it": "def d(g):\n    return lambda: g()\n@d\ndef f(): return 1",
    "a decorator's object": "class d:\n    def __init__(self, g): self._g = g\n"
    "    def __call__(self): return self._g()\n@d\ndef f(): return 1",
    "a decorator that registers": "def d(g): return g\n@d\ndef f(): return 1",
    "an argument of a decorator": "import functools\n@functools.lru_cache(maxsize=3)\ndef f(): return 1",
    "a partial of a decorator": "import functools\n@functools.partial\ndef f(): return 1",
}


@pytest.mark.parametrize("source", UPSTREAMS)
@pytest.mark.parametrize("early", [True, False])
def test_what_upstream_itself_made_of_a_function_is_no_change(toy: Toy, source: str, early: bool) -> None:
    toy.write("owner", UPSTREAMS[source] + "\n")
    if early:
        toy.load()
    patch = toy.patch("f", "wrap", lambda original, *args: original(*args))
    applied = toy.commit(patch)
    owner = toy.load()
    assert applied.report().warnings == () and hasattr(owner.f, "__wrapped__")
    importlib.reload(owner)
    assert applied.active and applied.report().warnings == ()


def test_another_plans_value_is_no_change(toy: Toy, owner: ModuleType) -> None:
    first = toy.commit(toy.patch("f", "replace", lambda: "first"))
    plan = make_plan(patches(toy, "f"), backend="cpu")
    second = AppliedPlan(plan)
    places = {toy.target(name): Attribute(owner, name) for name in ("f", "g")}
    second._meet_prior_changes(plan.steps, places)
    ours, vars(owner)["f"] = owner.f, another
    told = AppliedPlan(plan)
    told._meet_prior_changes(plan.steps, places)
    assert "owner:f holds another of " in told.report().warnings[0]
    vars(owner)["f"] = ours
    first.revert()
    second._meet_prior_changes(plan.steps, places)
    assert second.report().warnings == ()


def test_a_package_without_digests_may_be_changed(toy: Toy, owner: ModuleType) -> None:
    """Extensions of torch put their own functions into it."""
    vars(owner)["f"] = another
    patch = toy.patch("f", "wrap", lambda original: "patched", digest=None)
    applied = commit(make_plan([patch], backend="cpu", settings=Settings(unpinned=(toy.name,))))
    toy.applied.append(applied)
    assert owner.f() == "patched" and applied.report().warnings == ()
