"""A module that cannot be imported by itself: who gets its names, and what is back afterwards."""

from __future__ import annotations

import importlib
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest

from mt_megatron.errors import PatchError, PatchTargetError

from ..conftest import Toy, snapshot

OWNER = """
import absent_engine
class Layer: pass
"""

USER = """
try:
    from {toy}.owner import Layer, other as renamed
    HAVE = True
    Chosen = Layer
except ImportError:
    HAVE = False
    import math as fallback
    Chosen = fallback

def make(): return Layer()
"""

UNGUARDED = "from {toy}.owner import Layer\n"

WANTS_MORE = """
try:
    from {toy}.owner import Layer
    import another_absent_package
    HAVE = True
except (ImportError, ValueError):
    HAVE = False
"""


class Layer:
    """What stands in."""


def fill(module: ModuleType) -> None:
    vars(module).update(Layer=Layer, other=7)


@pytest.fixture
def written(toy: Toy) -> Toy:
    toy.write("owner", OWNER)
    toy.write("user", USER)
    toy.write("unguarded", UNGUARDED)
    toy.write("wants_more", WANTS_MORE)
    return toy


def committed(toy: Toy, body: Any = fill, **options: Any) -> Any:
    return toy.commit(toy.patch("", "module", body, **options))


def loaded(toy: Toy) -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.partition(".")[0] == toy.name]


def test_names_of_who_tried_before_are_put_right_and_taken_back(written: Toy) -> None:
    user, more = written.load("user"), written.load("wants_more")
    assert not user.HAVE and not more.HAVE
    before = snapshot(*loaded(written))
    applied = committed(written)
    assert user.HAVE and user.Chosen is Layer is user.Layer and user.renamed == 7
    assert type(user.make()) is Layer
    assert not more.HAVE and not hasattr(more, "Layer")
    assert applied.report().patches[0].state == "applied"
    applied.revert()
    assert snapshot(*loaded(written)) == before
    with pytest.raises(NameError):
        user.make()


def test_who_imports_meanwhile_has_afterwards_what_it_would_have_without(written: Toy) -> None:
    applied = committed(written)
    user = written.load("user")
    assert user.HAVE and written.load("unguarded").Layer is Layer
    owner = written.load()
    assert pickle.loads(pickle.dumps(owner.other)) == 7
    applied.revert()
    assert not user.HAVE and user.Chosen is user.fallback and not hasattr(user, "Layer")
    assert written.load("unguarded").Layer is Layer, "it cannot be without"
    assert f"{written.name}.owner" not in sys.modules
    assert not hasattr(sys.modules[written.name], "owner")
    with pytest.raises(ModuleNotFoundError, match="absent_engine"):
        written.load()
    committed(written)
    assert user.HAVE and user.Chosen is Layer and written.load().Layer is Layer


RUNNING = """
import {toy}
{before}
later = 1
try:
    attempts = {toy}.attempts = getattr({toy}, "attempts", 0) + later
    {within}
    from {toy}.owner import Layer
    HAVE = True
except ImportError:
    HAVE = False
"""

DEFINES = """
try:
    from {toy}.owner import Layer
    def made(): return Layer, SIZE
except ImportError:
    pass
SIZE = 3
"""


@pytest.mark.parametrize("place", ["before", "within"])
def test_a_statement_that_has_yet_to_end_is_left_to_its_module(written: Toy, place: str) -> None:
    source = RUNNING
    for each in ("before", "within"):
        source = source.replace("{" + each + "}", "{toy}.start()" if each == place else "")
    written.write("running", source)
    package = importlib.import_module(written.name)
    vars(package)["start"] = lambda: committed(written)
    running = written.load("running")
    assert running.HAVE and running.Layer is Layer and package.attempts == 1


def test_functions_of_a_statement_see_their_module(written: Toy) -> None:
    written.write("defines", DEFINES)
    defines = written.load("defines")
    before = snapshot(defines)
    applied = committed(written)
    vars(defines)["SIZE"] = 4
    assert defines.made() == (Layer, 4)
    vars(defines)["SIZE"] = 3
    applied.revert()
    assert snapshot(defines) == before


def test_others_still_miss_the_package(written: Toy) -> None:
    committed(written)
    with pytest.raises(ModuleNotFoundError, match="absent_engine"):
        importlib.import_module("absent_engine")


def test_where_the_package_is_there_nothing_is_served(written: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    (written.folder / "absent_engine.py").write_text("")
    monkeypatch.syspath_prepend(str(written.folder))
    importlib.invalidate_caches()
    try:
        applied = committed(written, unless=("absent_engine",))
        assert written.load("user").Layer is written.load().Layer is not Layer
        assert applied.report().left_out[0].why == "absent_engine can be imported"
    finally:
        sys.modules.pop("absent_engine", None)


def test_a_body_that_fails_undoes_everything(written: Toy) -> None:
    user = written.load("user")
    before = snapshot(*loaded(written))

    def broken(module: ModuleType) -> None:
        raise ValueError("no layers today")

    with pytest.raises((PatchError, ValueError), match="no layers today"):
        committed(written, broken)
    assert snapshot(*loaded(written)) == before and not user.HAVE


def test_its_target_is_a_module_that_exists(toy: Toy) -> None:
    with pytest.raises(PatchTargetError, match="no module"):
        committed(toy)
