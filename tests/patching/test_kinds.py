"""Every kind of patch on every kind of target: what callers see, and what is back afterwards."""

from __future__ import annotations

import functools
import inspect
import pickle
import types
from typing import Any

import pytest

from mt_megatron.errors import PatchConflictError, PatchError, PatchTargetError
from mt_megatron.patching.engine import commit, with_constants
from mt_megatron.patching.plan import Settings, make_plan

from .conftest import Toy, snapshot

OWNER = '''
import functools

def f(a, b: int = 1, *, c=2):
    """About f."""
    return ("f", a, b, c)

class C:
    """About C."""
    size = 3
    def m(self, a): return ("m", a)
    @staticmethod
    def s(a): return ("s", a)
    @classmethod
    def k(cls, a): return ("k", cls.__name__, a)
    @property
    def p(self):
        """About p."""
        return self._p
    @p.setter
    def p(self, value): self._p = value
    def __call__(self): return "called"
    def __len__(self): return 3

class D(C):
    def m(self, a): return ("D", *super().m(a))

class L(list):
    pass

def where(device='cuda', *rest):
    """cuda"""
    inner = lambda: 'cuda'
    table = {'cuda': 1, 'other': ('cuda', 'x')}
    return device, inner(), table, rest, f"{device}:cuda", device in ('cuda', 'musa'), 1, True

def decorate(function):
    @functools.wraps(function)
    def outer(*args): return function(*args)
    return outer

@decorate
def decorated(): return 'cuda'

FLAG = False
LIMITS = {"a": 1}
compiled = len
'''

SEEN: list[Any] = []


def passes(original: Any, *args: Any, **kwargs: Any) -> Any:
    return ("wrapped", original(*args, **kwargs))


@pytest.fixture(params=["imported before", "imported after"])
def when(request: pytest.FixtureRequest, toy: Toy) -> str:
    toy.write("owner", OWNER)
    if request.param == "imported before":
        toy.load()
    return str(request.param)


def test_wraps_a_function(when: str, toy: Toy) -> None:
    applied = toy.commit(toy.patch("f", "wrap", passes))
    owner = toy.load()
    assert owner.f(1, c=5) == ("wrapped", ("f", 1, 1, 5))
    applied.revert()
    assert owner.f(1, c=5) == ("f", 1, 1, 5)


def test_a_wrapped_function_looks_like_the_original(when: str, toy: Toy) -> None:
    toy.commit(toy.patch("f", "wrap", passes))
    f = toy.load().f
    assert (f.__module__, f.__name__, f.__qualname__) == (f"{toy.name}.owner", "f", "f")
    assert f.__doc__ == "About f."
    assert str(inspect.signature(f)) == "(a, b: int = 1, *, c=2)"
    assert inspect.isfunction(f)


def test_a_wrapped_method_looks_like_the_original(when: str, toy: Toy) -> None:
    toy.commit(*(toy.patch(f"C.{name}", "wrap", passes) for name in "mskp"))
    cls = toy.load().C
    assert [cls.m.__qualname__, cls.s.__qualname__, cls.k.__qualname__] == ["C.m", "C.s", "C.k"]
    assert [type(vars(cls)[name]) for name in "mskp"] == [
        types.FunctionType,
        staticmethod,
        classmethod,
        property,
    ]
    assert vars(cls)["p"].__doc__ == "About p."
    assert str(inspect.signature(cls().m)) == "(a)"


@pytest.mark.parametrize(
    ("name", "call", "before"),
    [
        ("m", lambda o: o.m(1), ("m", 1)),
        ("s", lambda o: o.s(1), ("s", 1)),
        ("s", lambda o: type(o).s(1), ("s", 1)),
        ("k", lambda o: o.k(1), ("k", "C", 1)),
        ("k", lambda o: type(o).k(1), ("k", "C", 1)),
        ("__call__", lambda o: o(), "called"),
    ],
)
def test_wraps_and_restores_methods(when: str, toy: Toy, name: str, call: Any, before: Any) -> None:
    applied = toy.commit(toy.patch(f"C.{name}", "wrap", passes))
    cls = toy.load().C
    assert call(cls()) == ("wrapped", before)
    applied.revert()
    assert call(cls()) == before


def test_wraps_a_special_method_that_has_a_slot(when: str, toy: Toy) -> None:
    applied = toy.commit(toy.patch("C.__len__", "wrap", lambda original, self: original(self) + 1))
    cls = toy.load().C
    assert len(cls()) == 4
    applied.revert()
    assert len(cls()) == 3


def test_wraps_the_getter_of_a_property_and_keeps_its_setter(when: str, toy: Toy) -> None:
    applied = toy.commit(toy.patch("C.p", "wrap", passes))
    instance = toy.load().C()
    instance.p = 7
    assert instance.p == ("wrapped", 7)
    applied.revert()
    assert instance.p == 7


def test_a_subclass_that_calls_super_sees_the_patch(when: str, toy: Toy) -> None:
    toy.commit(toy.patch("C.m", "wrap", passes))
    assert toy.load().D().m(1) == ("D", "wrapped", ("m", 1))


def test_a_classmethod_gets_the_class_it_was_called_on(when: str, toy: Toy) -> None:
    toy.commit(toy.patch("C.k", "wrap", passes))
    assert toy.load().D.k(1) == ("wrapped", ("k", "D", 1))


def test_wraps_compose_in_the_order_of_the_plan(when: str, toy: Toy) -> None:
    def add(text: str) -> Any:
        return lambda original, *args, **kwargs: (text, original(*args, **kwargs))

    applied = toy.commit(*(toy.patch("f", "wrap", add(str(i)), id=str(i)) for i in range(3)))
    owner = toy.load()
    assert owner.f(1) == ("2", ("1", ("0", ("f", 1, 1, 2))))
    applied.revert()
    assert owner.f(1) == ("f", 1, 1, 2)


def test_a_wrap_goes_around_a_replacement(when: str, toy: Toy) -> None:
    applied = toy.commit(
        toy.patch("f", "wrap", passes, id="w", after=("r",)),
        toy.patch("f", "replace", lambda a, b=1, *, c=2: "new", id="r"),
    )
    owner = toy.load()
    assert owner.f(1) == ("wrapped", "new")
    applied.revert()
    assert owner.f(1) == ("f", 1, 1, 2)


def test_a_wrap_goes_around_changed_literals(when: str, toy: Toy) -> None:
    applied = toy.commit(
        toy.patch("decorated", "constant", {"cuda": "cpu"}), toy.patch("decorated", "wrap", passes)
    )
    owner = toy.load()
    assert owner.decorated() == ("wrapped", "cpu")
    applied.revert()
    assert owner.decorated() == "cuda"


def new_f(a: int, b: int = 10, *, c: int = 20) -> Any:
    """Mine."""
    return ("new", a, b, c)


def test_replaces_a_function_under_the_targets_name(when: str, toy: Toy) -> None:
    applied = toy.commit(toy.patch("f", "replace", new_f))
    f = toy.load().f
    assert f(1) == ("new", 1, 10, 20)
    assert (f.__module__, f.__name__, f.__qualname__, f.__doc__) == (
        f"{toy.name}.owner",
        "f",
        "f",
        "Mine.",
    )
    assert new_f.__name__ == "new_f" and new_f.__module__ == __name__, "the body itself is untouched"
    applied.revert()
    assert toy.load().f(1) == ("f", 1, 1, 2)


def test_a_replacement_keeps_closure_and_attributes(when: str, toy: Toy) -> None:
    inside = 5

    def body(a: int, b: int = 1, *, c: int = 2) -> Any:
        return inside

    body.mark = "here"  # type: ignore[attr-defined]
    toy.commit(toy.patch("f", "replace", body))
    f = toy.load().f
    assert f(1) == 5 and f.mark == "here"


@pytest.mark.parametrize("name", ["s", "k", "p"])
def test_a_plain_function_takes_the_place_of_a_descriptor(when: str, toy: Toy, name: str) -> None:
    bodies = {"s": lambda a: ("new", a), "k": lambda cls, a: ("new", cls), "p": lambda self: "new"}
    applied = toy.commit(toy.patch(f"C.{name}", "replace", bodies[name]))
    cls = toy.load().C
    got = {"s": lambda: cls().s(1), "k": lambda: cls.k(1), "p": lambda: cls().p}[name]()
    assert got in (("new", 1), ("new", cls), "new")
    kinds = {"s": staticmethod, "k": classmethod, "p": property}
    assert type(vars(cls)[name]) is kinds[name]
    applied.revert()
    assert type(vars(cls)[name]) is kinds[name]


def test_a_descriptor_may_be_given_as_such(when: str, toy: Toy) -> None:
    toy.commit(toy.patch("C.s", "replace", staticmethod(lambda a: ("new", a))))
    assert toy.load().C().s(4) == ("new", 4)


def test_replaces_a_class(when: str, toy: Toy) -> None:
    class L(list):  # type: ignore[type-arg]
        extra = True

    L.__module__, L.__qualname__ = f"{toy.name}.owner", "L"
    applied = toy.commit(toy.patch("L", "replace", L))
    owner = toy.load()
    assert owner.L is L and pickle.loads(pickle.dumps(owner.L([1]))) == [1]
    applied.revert()
    assert owner.L is not L


def test_adds_a_function_a_method_and_a_value(when: str, toy: Toy) -> None:
    applied = toy.commit(
        toy.patch("extra", "add", lambda: "extra"),
        toy.patch("C.extra", "add", lambda self: ("extra", self.size)),
        toy.patch("C.number", "add", 5),
    )
    owner = toy.load()
    assert owner.extra() == "extra" and owner.extra.__qualname__ == "extra"
    assert owner.D().extra() == ("extra", 3) and owner.C.extra.__qualname__ == "C.extra"
    assert owner.C.number == 5
    applied.revert()
    for owner_of, name in ((owner, "extra"), (owner.C, "extra"), (owner.C, "number")):
        assert name not in vars(owner_of)


def test_what_a_base_class_has_can_be_added_below_it(when: str, toy: Toy) -> None:
    applied = toy.commit(toy.patch("L.append", "add", lambda self, one: self.insert(0, one)))
    cls = toy.load().L
    made = cls([1])
    made.append(2)
    assert made == [2, 1]
    applied.revert()
    assert "append" not in vars(cls)
    made.append(3)
    assert made == [2, 1, 3]


def test_what_came_into_being_at_run_time_cannot_be_added(when: str, toy: Toy) -> None:
    toy.write("owner", OWNER + "\nglobals()['made'] = 1\n")
    if when == "imported before":
        import importlib

        importlib.reload(toy.load())
    patch = toy.patch("made", "add", lambda: None)
    with pytest.raises((PatchConflictError, ImportError), match="adds .*made, but it exists"):
        toy.commit(patch)
        toy.load()


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("FLAG", lambda original: not original, True),
        ("LIMITS", lambda original: {**original, "b": 2}, {"a": 1, "b": 2}),
        ("compiled", lambda original: functools.partial(original, "abc"), None),
        ("C.size", lambda original: original + 1, 4),
    ],
)
def test_sets_a_value_made_from_the_original(
    when: str, toy: Toy, name: str, body: Any, expected: Any
) -> None:
    applied = toy.commit(toy.patch(name, "value", body))
    owner = toy.load()

    def now() -> Any:
        value: Any = owner
        for part in name.split("."):
            value = getattr(value, part)
        return value

    assert now() == expected or (name == "compiled" and now()() == 3)
    applied.revert()
    fresh: dict[str, Any] = {"__name__": "fresh"}
    exec(OWNER, fresh)
    assert now() == (fresh[name] if "." not in name else fresh["C"].size)


def test_a_value_that_is_the_original_changes_nothing(when: str, toy: Toy) -> None:
    applied = toy.commit(toy.patch("f", "value", lambda original: original))
    assert toy.load().f(1) == ("f", 1, 1, 2)
    assert [record.state for record in applied.report().patches] == ["applied"]
    applied.revert()


def test_exchanges_literals_in_place(when: str, toy: Toy) -> None:
    applied = toy.commit(toy.patch("where", "constant", {"cuda": "cpu", 1: 2}))
    where = toy.load().where
    device, inner, table, rest, text, inside, one, true = where("cpu")
    assert (inner, table, text) == ("cpu", {"cpu": 2, "other": ("cpu", "x")}, "cpu:cuda")
    assert inside is True and one == 2 and true is True
    assert where()[0] == "cuda", "a default argument is no literal of the code"
    applied.revert()
    assert where("cuda")[1:3] == ("cuda", {"cuda": 1, "other": ("cuda", "x")})


def test_literals_are_exchanged_behind_a_decorator(when: str, toy: Toy) -> None:
    applied = toy.commit(toy.patch("decorated", "constant", {"cuda": "cpu"}))
    assert toy.load().decorated() == "cpu"
    applied.revert()
    assert toy.load().decorated() == "cuda"


@pytest.mark.parametrize(
    ("table", "absent"), [({"nothing": 1}, "'nothing'"), ({"cuda": 1, 1.0: 2.0}, "1.0"), ({0: 1}, "0")]
)
def test_a_literal_that_does_not_occur_is_an_error(toy: Toy, table: dict[Any, Any], absent: str) -> None:
    toy.write("owner", OWNER)
    owner = toy.load()
    before = snapshot(owner)
    with pytest.raises(PatchTargetError, match=f"literal.*{absent}.*do not occur"):
        toy.commit(toy.patch("where", "constant", table))
    assert snapshot(owner) == before and owner.where()[1] == "cuda"


def test_keyword_names_are_no_literals() -> None:
    def call(**named: Any) -> Any:
        return dict(named, cuda="cuda", device="cuda")

    code = with_constants(call.__code__, {"cuda": "cpu"}, "call")
    changed = types.FunctionType(code, globals())
    assert changed() == {"cuda": "cpu", "device": "cpu"}


@pytest.mark.parametrize("literal", [1, True, 1.0, 1 + 0j])
def test_equal_literals_of_another_type_are_other_literals(literal: Any) -> None:
    def all_of_them() -> Any:
        return [1, True, 1.0, 1 + 0j]

    code = with_constants(all_of_them.__code__, {literal: "new"}, "x")
    found = types.FunctionType(code, {})()
    assert [type(value) for value in found].count(str) == 1
    assert found[[1, True, 1.0, 1 + 0j].index(literal)] == "new" or type(literal) is not int


def test_wraps_what_is_written_in_c(toy: Toy) -> None:
    toy.write("owner", "class Base(list): pass\n")
    owner = toy.load()
    plan = make_plan(
        [toy.patch("Base.count", "wrap", passes, digest=None)],
        backend="cpu",
        settings=Settings(unpinned=(toy.name,)),
    )
    applied = commit(plan)
    toy.applied.append(applied)
    assert owner.Base([1, 1]).count(1) == ("wrapped", 2)
    assert [1, 1].count(1) == 2, "the base class is as it was"
    applied.revert()
    assert "count" not in vars(owner.Base), "what was inherited is inherited again"
    assert owner.Base([1, 1]).count(1) == 2


def test_an_unpinned_target_that_does_not_exist_is_an_error_at_commit(toy: Toy) -> None:
    toy.write("owner", "class Base(list): pass\n")
    toy.load()
    plan = make_plan(
        [toy.patch("Base.nothing", "wrap", passes, digest=None, id="ghost")],
        backend="cpu",
        settings=Settings(unpinned=(toy.name,)),
    )
    with pytest.raises(PatchTargetError, match="Base.nothing does not exist here"):
        commit(plan)


def test_a_module_attribute_made_by_getattr_can_be_patched(toy: Toy) -> None:
    toy.write(
        "owner",
        """
        def __getattr__(name):
            if name == "lazy":
                return lambda: "lazy"
            raise AttributeError(name)
        """,
    )
    owner = toy.load()
    plan = make_plan(
        [toy.patch("lazy", "wrap", passes, digest=None)],
        backend="cpu",
        settings=Settings(unpinned=(toy.name,)),
    )
    applied = commit(plan)
    assert owner.lazy() == ("wrapped", "lazy")
    applied.revert()
    assert "lazy" not in vars(owner) and owner.lazy() == "lazy"


@pytest.mark.parametrize("kind", ["wrap", "replace", "value"])
def test_a_patched_function_is_pickled_by_name(toy: Toy, kind: str) -> None:
    toy.write("owner", OWNER)
    owner = toy.load()
    plain = pickle.dumps(owner.f)
    bodies: dict[str, Any] = {
        "wrap": passes,
        "replace": new_f,
        "value": lambda original: functools.wraps(original)(lambda *a: 1),
    }
    applied = toy.commit(toy.patch("f", kind, bodies[kind]))
    assert pickle.dumps(owner.f) == plain, "nothing of this package is in the pickle"
    assert pickle.loads(plain) is owner.f
    applied.revert()
    assert pickle.loads(plain) is owner.f


def test_instances_of_a_patched_class_are_pickled_without_us(toy: Toy) -> None:
    toy.write("owner", OWNER)
    owner = toy.load()
    instance = owner.C()
    instance.p = 1
    plain = pickle.dumps(instance)
    toy.commit(toy.patch("C.m", "wrap", passes), toy.patch("C.extra", "add", lambda self: 1))
    assert pickle.dumps(instance) == plain
    assert pickle.dumps(owner.C.m) == pickle.dumps(pickle.loads(pickle.dumps(owner.C.m)))


def test_everything_at_once_and_back(toy: Toy) -> None:
    toy.write("owner", OWNER)
    owner = toy.load()
    before = snapshot(owner)
    applied = toy.commit(
        toy.patch("f", "wrap", passes),
        *(toy.patch(f"C.{name}", "wrap", passes) for name in ("m", "s", "k", "p", "__call__")),
        toy.patch("D.m", "replace", lambda self, a: None),
        toy.patch("C.extra", "add", 1),
        toy.patch("FLAG", "value", lambda original: 1),
        toy.patch("LIMITS", "value", lambda original: {}),
        toy.patch("where", "constant", {"cuda": "cpu"}),
    )
    changed = {key for key, value in snapshot(owner).items() if before.get(key) != value}
    name = f"{toy.name}.owner"
    assert changed == {(name, "f"), (name, "FLAG"), (name, "LIMITS"), ("D", "m"), ("C", "extra")} | {
        ("C", one) for one in ("m", "s", "k", "p", "__call__")
    }
    applied.revert()
    assert snapshot(owner) == before


def test_a_body_that_raises_is_named(toy: Toy) -> None:
    toy.write("owner", OWNER)
    toy.load()
    with pytest.raises(PatchError, match="patch bad of .*FLAG failed: ZeroDivisionError") as caught:
        toy.commit(toy.patch("FLAG", "value", lambda original: 1 / 0, id="bad"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
