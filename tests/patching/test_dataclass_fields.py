"""Fields added to a dataclass: its subclasses of before and after, its methods, and back again."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import typing
from dataclasses import dataclass, field
from typing import Any

import pytest

from mt_megatron.errors import PatchConflictError, PatchTargetError

from .conftest import Toy, snapshot

SOURCE = """
    from dataclasses import dataclass

    @dataclass
    class Base:
        first: int
        second: int = 2

        def __post_init__(self):
            self.seen = getattr(self, "added", "nothing")

    @dataclass
    class Early(Base):
        mine: int = 3

    @dataclass
    class Named(Base):
        added: str = "its own"

    class Plain(Early):
        pass

    class Written(Base):
        def __init__(self, first):
            super().__init__(first, second=first + 1)

    class Open(Base):
        def __init__(self, **values):
            super().__init__(0, **values)
"""


def added(**defaults: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Keyword-only fields of these names and defaults."""
    rows = [(name, type(value), field(default=value, kw_only=True)) for name, value in defaults.items()]
    return dataclasses.fields(dataclasses.make_dataclass("Rows", rows))


@pytest.fixture
def owner(toy: Toy) -> Any:
    toy.write("owner", SOURCE)
    return toy.load()


@pytest.fixture
def patched(toy: Toy, owner: Any) -> Any:
    toy.commit(toy.patch("Base", "fields", added(added=5, other="x")))
    return owner


@pytest.mark.parametrize("name", ["Base", "Early", "Plain", "Written"])
def test_a_class_of_before_takes_the_fields_and_its_post_init_sees_them(patched: Any, name: str) -> None:
    made = getattr(patched, name)(1, added=7)
    assert (made.first, made.added, made.other, made.seen) == (1, 7, "x", 7)
    assert getattr(patched, name)(1).added == 5
    with pytest.raises(TypeError):
        getattr(patched, name)(1, wrong=1)


def test_a_class_that_passes_keywords_on_passes_these_on(patched: Any) -> None:
    made = patched.Open(added=8, second=9)
    assert (made.added, made.second, made.seen) == (8, 9, 8)


def test_a_field_that_a_subclass_has_stays_its_own(patched: Any) -> None:
    made = patched.Named(1, added="kept", other="y")
    assert (made.added, made.other) == ("kept", "y")
    assert patched.Named(1).added == "its own"


def test_a_class_of_afterwards_inherits_them_without_moving_its_positions(patched: Any) -> None:
    @dataclass
    class Late(patched.Base):  # type: ignore[name-defined, misc]
        third: int = 3

    made = Late(1, 2, 30, added=6)
    assert (made.third, made.added) == (30, 6)


@pytest.mark.parametrize("name", ["Base", "Early", "Plain"])
def test_what_dataclasses_offers_knows_them(patched: Any, name: str) -> None:
    made = getattr(patched, name)(1, added=[1])
    assert "added" in {one.name for one in dataclasses.fields(made)}
    other = dataclasses.replace(made, other="z")
    assert (other.added, other.other) == ([1], "z")
    assert dataclasses.asdict(made)["added"] == [1]
    assert made == dataclasses.replace(made) and made != other
    assert made != getattr(patched, name)(2, added=[1]), "the fields of before still count"
    assert "added=[1]" in repr(made) and "first=1" in repr(made)
    assert copy.deepcopy(made) == made and copy.deepcopy(made).added is not made.added


def test_instances_travel_and_those_of_before_have_the_default(toy: Toy, owner: Any) -> None:
    before = owner.Early(1)
    toy.commit(toy.patch("Base", "fields", added(added=5)))
    assert before.added == 5
    made = owner.Early(1, added=2)
    assert pickle.loads(pickle.dumps(made)) == made


def test_signature_and_annotations_name_them(patched: Any) -> None:
    parameters = inspect.signature(patched.Base).parameters
    assert parameters["added"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(parameters)[:2] == ["first", "second"]
    assert typing.get_type_hints(patched.Base)["added"] is int


def test_undoing_puts_every_attribute_back(toy: Toy, owner: Any) -> None:
    before = snapshot(owner)
    applied = toy.commit(toy.patch("Base", "fields", added(added=5)))
    assert snapshot(owner) != before
    applied.revert()
    assert snapshot(owner) == before
    with pytest.raises(TypeError):
        owner.Base(1, added=1)
    again = toy.commit(toy.patch("Base", "fields", added(added=5)))
    assert owner.Early(1, added=6).added == 6
    again.revert()
    assert snapshot(owner) == before


def test_a_subclass_that_was_made_meanwhile_survives_another_patch(toy: Toy, owner: Any) -> None:
    applied = toy.commit(toy.patch("Base", "fields", added(added=5)))

    @dataclass
    class Late(owner.Base):  # type: ignore[name-defined, misc]
        third: int = 3

    applied.revert()
    toy.commit(toy.patch("Base", "fields", added(added=5)))
    assert Late(1, added=9).added == 9


def test_a_module_that_is_imported_later_is_met_then(toy: Toy) -> None:
    toy.write("owner", SOURCE)
    toy.commit(toy.patch("Base", "fields", added(added=5)))
    assert toy.load().Early(1, added=6).seen == 6


@pytest.mark.parametrize(
    ("qualname", "body", "error", "message"),
    [
        ("Base", (), PatchTargetError, "not empty"),
        ("Base", lambda: 1, PatchTargetError, "tuple"),
        ("Base", added(second=1), PatchConflictError, "has second already"),
        ("Base.__post_init__", added(added=1), PatchTargetError, "no class"),
        ("Plain", added(added=1), PatchTargetError, "no dataclass"),
    ],
)
def test_what_cannot_be_added_is_refused_and_nothing_changes(
    toy: Toy, owner: Any, qualname: str, body: Any, error: type[Exception], message: str
) -> None:
    before = snapshot(owner)
    with pytest.raises(error, match=message):
        toy.commit(toy.patch(qualname, "fields", body))
    assert snapshot(owner) == before


def test_positional_fields_and_factories_are_refused(toy: Toy, owner: Any) -> None:
    for row in (field(default=1), field(default_factory=list, kw_only=True)):
        (one,) = dataclasses.fields(dataclasses.make_dataclass("Rows", [("added", int, row)]))
        with pytest.raises(PatchTargetError, match="'added'"):
            toy.commit(toy.patch("Base", "fields", (one,)))
