"""The report says what was done, in words and as data."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mt_megatron.errors import PatchError
from mt_megatron.patching.plan import make_plan

from .conftest import Toy


@pytest.fixture
def toy(toy: Toy) -> Toy:
    toy.write("owner", "def f(): return 1\ndef g(): return 2\n")
    toy.write("late", "def h(): return 3\n")
    toy.write("user", "from {toy}.owner import f as mine\n")
    toy.load("user")
    return toy


def test_a_report_of_every_state(toy: Toy) -> None:
    applied = toy.commit(
        toy.patch("f", "wrap", lambda original: 1, id="a.f", feature="alpha"),
        toy.patch("h", "wrap", lambda original: 1, id="a.h", module="late"),
        toy.patch("g", "wrap", lambda original: 1, id="a.g", backends=frozenset({"musa"})),
        toy.patch("g", "rebind", lambda original: 1, id="a.r", scope=("zz",)),
    )
    found = applied.report()
    assert [record.id for record in found.applied] == ["a.f", "a.r"]
    assert [record.id for record in found.pending] == ["a.h"]
    assert [record.id for record in found.left_out] == ["a.g"]
    first = found.patches[0]
    assert (first.target, first.kind, first.feature, first.reason) == (
        toy.target("f"),
        "wrap",
        "alpha",
        "a test",
    )
    assert first.rebound == (f"name 'mine' of module '{toy.name}.user'",)
    assert first.digest is not None and len(first.digest) == 64
    toy.load("late")
    assert [record.id for record in applied.report().pending] == []
    assert [record.id for record in found.pending] == ["a.h"], "a report is of one moment"
    applied.revert()
    states = {record.id: record.state for record in applied.report().patches}
    assert states == {"a.f": "undone", "a.h": "undone", "a.r": "undone", "a.g": "left out"}


def test_a_report_is_frozen(toy: Toy) -> None:
    found = toy.commit().report()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.backend = "x"  # type: ignore[misc]


def test_json_holds_everything(toy: Toy) -> None:
    applied = toy.commit(toy.patch("f", "wrap", lambda original: 1, id="a.f"))
    found = applied.report()
    data = json.loads(found.to_json())
    assert data["plan_digest"] == found.plan_digest == applied.plan.digest
    assert data["backend"] == "cpu" and data["patches"][0]["id"] == "a.f"
    assert set(data) == {field.name for field in dataclasses.fields(found)}
    assert set(data["patches"][0]) == {field.name for field in dataclasses.fields(found.patches[0])}


def test_explains_one_patch(toy: Toy) -> None:
    applied = toy.commit(
        toy.patch("f", "wrap", lambda original: 1, id="a.f"),
        toy.patch("g", "wrap", lambda original: 1, id="a.g", backends=frozenset({"musa"})),
    )
    text = applied.report().explain("a.f")
    for part in ("a.f: applied", "wrap", toy.target("f"), "reason: a test", "upstream digest", "name 'mine'"):
        assert part in text
    assert "a.g: left out (is for backend musa, this is cpu)" in applied.report().explain("a.g")
    with pytest.raises(PatchError, match="no patch has the id 'a.ff'; did you mean 'a.f'"):
        applied.report().explain("a.ff")


def test_a_summary_is_one_line(toy: Toy) -> None:
    applied = toy.commit(
        toy.patch("f", "wrap", lambda original: 1, id="a.f"),
        toy.patch("h", "wrap", lambda original: 1, id="a.h", module="late"),
        toy.patch("g", "wrap", lambda original: 1, id="a.g", backends=frozenset({"musa"})),
    )
    text = applied.report().summary()
    assert "\n" not in text
    assert "1 applied, 1 waiting for their modules, 1 left out" in text
    assert applied.plan.digest[:12] in text


def test_notes_of_the_plan_are_warnings_of_the_report(toy: Toy) -> None:
    from mt_megatron.patching.engine import commit

    applied = commit(make_plan([], backend="cpu", why="because", notes=["torch is new"]))
    assert applied.report().warnings == ("torch is new",)
    assert "(because)" in applied.report().summary()
